//! The coordinator's config file. `deploy/config/coordinator.toml` is one with every key and its default.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use larder_net::addresses::address;
use larder_net::config_file;
use larder_net::failure::Failure;
use larder_net::line_file::RecordConfig;
use larder_net::quic::CredentialFiles;
use larder_net::trace::TracingConfig;
use serde::{Deserialize, Serialize};
use url::Url;

use crate::election::Timing;
use crate::membership::Patience;

/// The coordinator's configuration file. Unknown keys are refused.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The HTTP server.
    pub http: HttpConfig,
    /// The server for nodes and other followers.
    pub peer: PeerConfig,
    /// The state's file.
    pub state: StateConfig,
    /// The heartbeat, and how long the coordinator waits for silent nodes.
    pub membership: Patience,
    /// The election of a leader among several coordinators.
    pub election: ElectionConfig,
    /// The audit log of changes and their authors. Without it, only the coordinator's own log has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audit: Option<RecordConfig>,
    /// The collector of traces; without an endpoint, nothing is traced.
    pub tracing: TracingConfig,
}

/// The HTTP server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HttpConfig {
    /// Address and port; port 0 takes a free one.
    #[serde(deserialize_with = "address")]
    pub listen: SocketAddr,
    /// The file with the token for reading the console, and nothing else in it. Without it, only this host reads the console.
    pub console_token_file: Option<PathBuf>,
    /// The file with the token that lets the console change policies, drain and forget nodes, pin and purge. Without it, the
    /// console changes nothing.
    pub console_admin_token_file: Option<PathBuf>,
    /// The admin's certificate chain (PEM) for these changes: `larder ca issue admin NAME` makes one.
    pub console_admin_certificate: Option<PathBuf>,
    /// The certificate's private key (PEM).
    pub console_admin_key: Option<PathBuf>,
    /// The folder with tokenizers of models: `MODEL/tokenizer.json`, by the names that namespaces have. With them the console
    /// takes the text of a prompt. The program needs the feature `tokenizers`.
    pub console_tokenizers: Option<PathBuf>,
}

/// The server for nodes and other followers (QUIC).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PeerConfig {
    /// Address and UDP port; port 0 takes a free one.
    #[serde(deserialize_with = "address")]
    pub listen: SocketAddr,
    /// Certificates of the authorities that are trusted (PEM).
    pub ca: PathBuf,
    /// The coordinator's own certificate chain (PEM): `larder ca issue coordinator NAME` makes one.
    pub certificate: PathBuf,
    /// Its private key (PEM).
    pub key: PathBuf,
}

/// The state's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StateConfig {
    /// The file; it is made if it does not exist.
    pub path: PathBuf,
}

/// The election of a leader among several coordinators.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ElectionConfig {
    /// The place where the coordinators elect a leader.
    pub backend: Backend,
    /// Another coordinator takes over after this time without a renewal of the leader's lease, at the latest.
    pub lease_ms: u64,
    /// A leader that cannot renew its lease stops leading after this time.
    pub renew_within_ms: u64,
    /// Time between renewals, and between looks at the lease.
    pub retry_ms: u64,
    /// The key in etcd, or the Lease in the account's own namespace. Clusters that share etcd or the namespace need different
    /// names.
    pub name: String,
    /// The host at which nodes and other coordinators reach this one; by default, this coordinator's listen address.
    pub advertise: Option<String>,
    /// URLs of etcd's members.
    pub endpoints: Option<Vec<String>>,
    /// Certificates of the authorities that sign the certificates of etcd's members (PEM). URLs with `https` need it.
    pub ca: Option<PathBuf>,
    /// The certificate chain that this coordinator shows to etcd (PEM).
    pub certificate: Option<PathBuf>,
    /// Its private key (PEM).
    pub key: Option<PathBuf>,
    /// The user in etcd.
    pub user: Option<String>,
    /// The file with the user's password, and nothing else in it.
    pub password_file: Option<PathBuf>,
    /// The file that tells how to reach the API server of Kubernetes; by default `KUBECONFIG`, or the pod's service account.
    pub kubeconfig: Option<PathBuf>,
}

/// The place where coordinators elect a leader.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// No place: there is one coordinator.
    #[default]
    Embedded,
    /// A key in etcd.
    Etcd,
    /// A Lease in Kubernetes.
    Kubernetes,
}

impl Config {
    /// Reads a config file.
    ///
    /// # Errors
    /// The file cannot be read, or says something impossible.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let shown = path.display();
        let text = config_file::read(path)
            .map_err(|error| Failure::because(error, format!("cannot read the config file {shown}")))?;
        let config: Self = toml::from_str(&text)
            .map_err(|error| Failure::because(error, format!("the config file {shown} is wrong")))?;
        config.check()?;
        Ok(config)
    }

    /// Whether a coordinator can work with this configuration.
    ///
    /// # Errors
    /// It says something impossible.
    pub fn check(&self) -> Result<(), Failure> {
        let Patience { heartbeat_ms, suspect_after_ms, remove_after_ms, remove_reported_after_ms, .. } =
            self.membership;
        let removed_ms = remove_after_ms.min(remove_reported_after_ms);
        if !(0 < heartbeat_ms && heartbeat_ms < suspect_after_ms && suspect_after_ms < removed_ms) {
            return Err(Failure::new(format!(
                "membership: heartbeat_ms ({heartbeat_ms}) < suspect_after_ms ({suspect_after_ms}) < remove_after_ms ({remove_after_ms}) and remove_reported_after_ms ({remove_reported_after_ms}) must hold, and heartbeat_ms be at least 1"
            )));
        }
        let ElectionConfig { backend, lease_ms, renew_within_ms, retry_ms, .. } = self.election;
        if !(0 < retry_ms && retry_ms < renew_within_ms && renew_within_ms < lease_ms) {
            return Err(Failure::new(format!(
                "election: retry_ms ({retry_ms}) < renew_within_ms ({renew_within_ms}) < lease_ms ({lease_ms}) must hold, and retry_ms be at least 1"
            )));
        }
        self.election.check_names()?;
        if backend == Backend::Etcd {
            self.election.check_etcd()?;
        }
        if self.audit.as_ref().is_some_and(|audit| audit.max_bytes.0 == 0) {
            return Err(Failure::new("audit: max_bytes must be at least 1"));
        }
        let http = &self.http;
        let admin =
            [&http.console_admin_token_file, &http.console_admin_certificate, &http.console_admin_key];
        if !matches!(admin.into_iter().flatten().count(), 0 | 3) {
            return Err(Failure::new(
                "[http] console_admin_token_file, console_admin_certificate and console_admin_key go together: set all three, or none",
            ));
        }
        let found = self.tracing.sample_ratio;
        if !(0.0..=1.0).contains(&found) {
            return Err(Failure::new(format!(
                "`tracing.sample_ratio` is {found}: set it to between 0 and 1"
            )));
        }
        self.tracing.url().map_err(|error| Failure::new(error.to_string()))?;
        Ok(())
    }
}

impl PeerConfig {
    /// The coordinator's certificate, and the authorities that it trusts.
    pub fn credentials(&self) -> CredentialFiles {
        let Self { ca, certificate, key, .. } = self.clone();
        CredentialFiles { ca, certificate, key }
    }
}

impl ElectionConfig {
    pub(crate) fn timing(&self) -> Timing {
        let Self { lease_ms, renew_within_ms, retry_ms, .. } = *self;
        let silence_ms = (lease_ms / 4).max(LEAST_SILENCE_MS);
        Timing { lease_ms, renew_within_ms, retry_ms, silence_ms }
    }

    fn check_names(&self) -> Result<(), Failure> {
        if self.name.is_empty() {
            return Err(Failure::new("election: name must not be empty"));
        }
        match &self.advertise {
            Some(host) if !is_host(host) => Err(Failure::new(format!(
                "election: advertise is `{host}`: set it to the name or IP address of this host, without a port; the ports are those of [peer] and [http]"
            ))),
            _ => Ok(()),
        }
    }

    fn check_etcd(&self) -> Result<(), Failure> {
        let Some(endpoints) = self.endpoints.as_ref().filter(|endpoints| !endpoints.is_empty()) else {
            return Err(Failure::new(
                "election: name etcd's members, as endpoints = [\"http://etcd.example:2379\"]",
            ));
        };
        if let Some(found) = endpoints.iter().find(|endpoint| !is_url_of_etcd(endpoint)) {
            return Err(Failure::new(format!(
                "election: `{found}` in endpoints is no URL of etcd, such as http://etcd.example:2379"
            )));
        }
        let is_secret = |endpoint: &String| endpoint.starts_with("https://");
        if !endpoints.iter().all(|endpoint| is_secret(endpoint) == self.ca.is_some())
            || (self.ca.is_none() && self.certificate.is_some())
        {
            return Err(Failure::new(
                "election: endpoints that begin with https:// need `ca`, and only they have `ca`, `certificate` and `key`",
            ));
        }
        if self.certificate.is_some() != self.key.is_some()
            || self.user.is_some() != self.password_file.is_some()
        {
            return Err(Failure::new(
                "election: give both or none of `certificate` and `key`, and of `user` and `password_file`",
            ));
        }
        Ok(())
    }
}

/// Whether others may find a host by this: a name, or an IP address.
fn is_host(text: &str) -> bool {
    let is_name = |text: &str| {
        let is_of_names = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        !text.is_empty() && text.bytes().all(is_of_names)
    };
    text.parse::<IpAddr>().map_or_else(|_| is_name(text), |address| !address.is_unspecified())
}

/// Whether a client of etcd can use this: `http://HOST:PORT` or with https, or `HOST:PORT` alone.
fn is_url_of_etcd(text: &str) -> bool {
    let text = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    Url::parse(&text).is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.path() == "/")
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            listen: (Ipv4Addr::UNSPECIFIED, DEFAULT_HTTP_PORT).into(),
            console_token_file: None,
            console_admin_token_file: None,
            console_admin_certificate: None,
            console_admin_key: None,
            console_tokenizers: None,
        }
    }
}

impl Default for PeerConfig {
    fn default() -> Self {
        Self {
            listen: (Ipv4Addr::UNSPECIFIED, DEFAULT_PEER_PORT).into(),
            ca: "/etc/larder/ca.pem".into(),
            certificate: "/etc/larder/coordinator.pem".into(),
            key: "/etc/larder/coordinator.key".into(),
        }
    }
}

impl Default for StateConfig {
    fn default() -> Self {
        Self { path: "/var/lib/larder/coordinator.redb".into() }
    }
}

impl Default for ElectionConfig {
    fn default() -> Self {
        Self {
            backend: Backend::Embedded,
            lease_ms: 6_000,
            renew_within_ms: 4_000,
            retry_ms: 1_000,
            name: "larder-coordinator".into(),
            advertise: None,
            endpoints: None,
            ca: None,
            certificate: None,
            key: None,
            user: None,
            password_file: None,
            kubeconfig: None,
        }
    }
}

/// A leader may be silent for this time, however short the lease is, since a busy machine may hold a process up.
const LEAST_SILENCE_MS: u64 = 1_000;

const DEFAULT_HTTP_PORT: u16 = 7600;
const DEFAULT_PEER_PORT: u16 = 7601;

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    fn read(text: &str) -> Result<Config, Failure> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("coordinator.toml");
        std::fs::write(&path, text).unwrap();
        Config::read(&path)
    }

    #[test]
    fn the_deployed_file_is_the_default_configuration_and_lacks_no_default() {
        let deployed = include_str!("../../deploy/config/coordinator.toml");
        assert_eq!(read(deployed).unwrap(), Config::default());
        let defaults = toml::Table::try_from(Config::default()).unwrap();
        assert_eq!(deployed.parse::<toml::Table>().unwrap(), defaults);
    }

    #[test]
    fn an_empty_file_means_the_defaults() {
        assert_eq!(read("").unwrap(), Config::default());
    }

    #[test]
    fn unknown_keys_are_named() {
        let error = read("[http]\nlissten = \"127.0.0.1:1\"").unwrap_err();
        assert!(error.source().unwrap().to_string().contains("lissten"), "{error:?}");
    }

    #[test]
    fn times_that_contradict_each_other_are_refused() {
        let error = read("[membership]\nsuspect_after_ms = 500").unwrap_err();
        assert!(error.to_string().contains("heartbeat_ms (1000) < suspect_after_ms (500)"), "{error}");
    }

    #[test]
    fn an_election_that_cannot_work_is_refused() {
        let error = read("[election]\nlease_ms = 3000").unwrap_err();
        assert!(error.to_string().contains("renew_within_ms (4000) < lease_ms (3000)"), "{error}");
        let error = read("[election]\nbackend = 'etcd'").unwrap_err();
        assert!(error.to_string().contains("endpoints = [\"http://"), "{error}");
        assert!(read("[election]\nbackend = 'zookeeper'").is_err());
        let etcd = |scheme, more: &str| {
            read(&format!("[election]\nbackend = 'etcd'\nendpoints = ['{scheme}://etcd:2379']\n{more}"))
        };
        for (scheme, more) in
            [("https", ""), ("http", "ca = 'ca.pem'"), ("http", "certificate = 'c'\nkey = 'k'")]
        {
            let error = etcd(scheme, more).unwrap_err().to_string();
            assert!(error.contains("that begin with https:// need `ca`"), "{scheme} {more}: {error}");
        }
        for more in ["key = 'k'", "user = 'larder'", "password_file = 'p'"] {
            let error = etcd("https", &format!("ca = 'ca.pem'\n{more}")).unwrap_err().to_string();
            assert!(error.contains("give both or none"), "{more}: {error}");
        }
        assert!(etcd("https", "ca = 'ca.pem'\nuser = 'larder'\npassword_file = 'p'").is_ok());
    }

    #[test]
    fn names_and_addresses_of_an_election_that_nobody_can_use_are_refused() {
        let advertise = |host: &str| read(&format!("[election]\nadvertise = '{host}'"));
        for host in ["c-0", "c_0.example", "10.0.0.1", "fd00::1"] {
            advertise(host).unwrap();
        }
        for host in
            ["", "10.0.0.1:7601", "c-0:7601", "[fd00::1]", "[fd00::1]:7601", "http://c-0", "0.0.0.0", "::"]
        {
            let error = advertise(host).unwrap_err();
            assert!(error.to_string().contains("without a port"), "{host}: {error}");
        }
        let error = read("[election]\nname = ''").unwrap_err();
        assert_eq!(error.to_string(), "election: name must not be empty");
        let etcd =
            |url: &str| read(&format!("[election]\nbackend = 'etcd'\nendpoints = ['http://a:1', '{url}']"));
        for url in [
            "http://etcd.example:2379",
            "http://127.0.0.1:2379/",
            "http://[::1]:2379",
            "etcd:2379",
            "http://etcd",
        ] {
            etcd(url).unwrap();
        }
        for url in
            ["", "http://", "http://:2379", "ftp://a b", "http://a:b", "http://a:99999", "http://::1:2379"]
        {
            let error = etcd(url).unwrap_err();
            assert!(error.to_string().contains(&format!("`{url}` in endpoints is no URL")), "{error}");
        }
    }

    #[test]
    fn the_consoles_admin_has_all_three_settings_or_none() {
        let one = "[http]\nconsole_admin_key = \"a.key\"\n";
        let two = format!("{one}console_admin_certificate = \"a.pem\"\n");
        let three = format!("{two}console_admin_token_file = \"token\"\n");
        for text in [one, &two] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains("go together: set all three, or none"), "{text}: {error}");
        }
        read(&three).unwrap();
    }

    #[test]
    fn an_audit_log_needs_a_path_and_room() {
        let audit = read("[audit]\npath = '/var/log/larder/audit'").unwrap().audit.unwrap();
        assert_eq!((audit.max_bytes.as_u64(), audit.old_files), (64 << 20, 4));
        assert!(read("[audit]\nold_files = 4").is_err());
        let error = read("[audit]\npath = 'a'\nmax_bytes = 0").unwrap_err();
        assert_eq!(error.to_string(), "audit: max_bytes must be at least 1");
    }

    #[test]
    fn an_endpoint_or_a_fraction_for_traces_that_is_none_is_refused() {
        let error = read("[tracing]\nendpoint = \"collector:4317\"").unwrap_err();
        assert!(error.to_string().contains("`collector:4317`"), "{error}");
        let error = read("[tracing]\nsample_ratio = 1.5").unwrap_err();
        assert!(error.to_string().contains("is 1.5"), "{error}");
    }

    #[test]
    fn an_address_with_a_host_name_is_refused_with_an_example() {
        let error = read("[peer]\nlisten = \"localhost:7601\"").unwrap_err().source().unwrap().to_string();
        assert!(error.contains("line 2") && error.contains("such as \"127.0.0.1:9440\""), "{error}");
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Config::read(Path::new("/nowhere/coordinator.toml")).unwrap_err();
        assert_eq!(error.to_string(), "cannot read the config file /nowhere/coordinator.toml");
    }
}
