//! An etcd of one member, for elections.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};

use anyhow::Context as _;
use serde_json::json;
use tempfile::TempDir;

use crate::server::Killed;
use crate::tls::Authority;
use crate::wait;

/// A running etcd. Dropping it kills it.
pub struct Etcd {
    command: Command,
    child: Killed,
    url: String,
    // Last: the directory is removed when etcd no longer writes there.
    _dir: TempDir,
}

impl Etcd {
    /// Starts etcd, and waits until it serves; `None` if this machine has no etcd.
    ///
    /// # Errors
    /// Fails if there is an etcd and it does not come up.
    pub fn start() -> anyhow::Result<Option<Self>> {
        let Some(etcd) = Self::spawn(tempfile::tempdir()?, "http", &[])? else { return Ok(None) };
        wait::until("etcd serves", || ureq::get(format!("{}/health", etcd.url)).call().ok());
        Ok(Some(etcd))
    }

    /// As [`Self::start`], with TLS: it serves only clients with a certificate of this authority.
    ///
    /// # Errors
    /// Fails if there is an etcd and it does not come up.
    pub fn start_tls(authority: &Authority) -> anyhow::Result<Option<Self>> {
        let files = authority.issue("etcd")?;
        let dir = tempfile::tempdir()?;
        let [ca, certificate, key] = ["ca.pem", "etcd.pem", "etcd.key"].map(|name| dir.path().join(name));
        fs::write(&ca, files.ca_pem)?;
        fs::write(&certificate, files.certificate_pem)?;
        fs::write(&key, files.key_pem)?;
        let flags = [
            "--client-cert-auth".to_owned(),
            format!("--trusted-ca-file={}", ca.display()),
            format!("--cert-file={}", certificate.display()),
            format!("--key-file={}", key.display()),
        ];
        let Some(etcd) = Self::spawn(dir, "https", &flags)? else { return Ok(None) };
        let address = etcd.url.trim_start_matches("https://").to_owned();
        wait::until("etcd listens", || TcpStream::connect(&address).ok());
        Ok(Some(etcd))
    }

    /// From now on, etcd serves only clients with a name and a password. The users are `root` and `larder`; each has its name as
    /// its password. `larder` may use the key `larder-coordinator` and no other.
    ///
    /// # Errors
    /// Fails if etcd refuses.
    pub fn require_passwords(&self) -> anyhow::Result<()> {
        for (path, body) in [
            ("user/add", json!({"name": "root", "password": "root"})),
            ("role/add", json!({"name": "root"})),
            ("user/grant", json!({"user": "root", "role": "root"})),
            ("user/add", json!({"name": "larder", "password": "larder"})),
            ("role/add", json!({"name": "election"})),
            ("role/grant", json!({"name": "election", "perm": {"permType": "READWRITE", "key": KEY}})),
            ("user/grant", json!({"user": "larder", "role": "election"})),
            ("enable", json!({})),
        ] {
            let asked = ureq::post(format!("{}/v3/auth/{path}", self.url)).send(body.to_string().as_bytes());
            asked.with_context(|| format!("etcd refuses {path} {body}"))?;
        }
        Ok(())
    }

    fn spawn(dir: TempDir, scheme: &str, more: &[String]) -> anyhow::Result<Option<Self>> {
        let [url, peers] = [free_url(scheme)?, free_url("http")?];
        let folder = dir.path().join("data").to_string_lossy().into_owned();
        let cluster = format!("default={peers}");
        let flags = [
            ("--data-dir", &folder),
            ("--listen-client-urls", &url),
            ("--advertise-client-urls", &url),
            ("--listen-peer-urls", &peers),
            ("--initial-advertise-peer-urls", &peers),
            ("--initial-cluster", &cluster),
        ];
        let mut command = Command::new("etcd");
        command.args(["--unsafe-no-fsync", "--logger", "zap"]).stdout(Stdio::null()).stderr(Stdio::null());
        command.args(flags.iter().flat_map(|(flag, value)| [*flag, value.as_str()])).args(more);
        let child = match command.spawn() {
            Ok(child) => Killed(child),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        Ok(Some(Self { command, child, url, _dir: dir }))
    }

    /// Kills etcd and starts it again with its data.
    ///
    /// # Errors
    /// Fails if etcd cannot be started.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child = Killed(self.command.spawn()?);
        Ok(())
    }

    /// The address for clients.
    pub fn url(&self) -> &str {
        &self.url
    }
}

/// A URL with a port that was free a moment ago: etcd does not tell which port it took.
fn free_url(scheme: &str) -> anyhow::Result<String> {
    Ok(format!("{scheme}://{}", TcpListener::bind("127.0.0.1:0")?.local_addr()?))
}

/// `larder-coordinator` in base64, which etcd's JSON uses for bytes.
const KEY: &str = "bGFyZGVyLWNvb3JkaW5hdG9y";
