//! A register in etcd: one key, compared by its revision.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::Duration;

use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, Identity, ResponseHeader, TlsOptions, Txn, TxnOp,
};

use super::{Register, Trouble};
use crate::config::ElectionConfig;
use crate::election::{Record, Version};

/// A key in etcd.
pub struct Etcd {
    config: ElectionConfig,
    /// The connection; none after a failure. The next question then connects with the files of that time.
    client: Cell<Option<Client>>,
}

/// A file that is needed to speak with etcd cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}, which [election] names for etcd", path.display())]
pub struct EtcdError {
    path: PathBuf,
    source: std::io::Error,
}

impl Etcd {
    /// Uses the key that the configuration names. It connects when it is asked.
    ///
    /// # Errors
    /// [`EtcdError`]
    pub fn new(config: &ElectionConfig) -> Result<Self, EtcdError> {
        options(config)?;
        Ok(Self { config: config.clone(), client: Cell::default() })
    }

    /// The connection. The caller puts it back after an answer.
    async fn connected(&self) -> Result<Client, Trouble> {
        if let Some(client) = self.client.take() {
            return Ok(client);
        }
        let endpoints = self.config.endpoints.as_deref().unwrap_or_default();
        Ok(Client::connect(endpoints, Some(options(&self.config)?)).await?)
    }
}

impl Register for Etcd {
    async fn read(&self) -> Result<Option<(Version, Record)>, Trouble> {
        let client = self.connected().await?;
        let found = client.kv_client().get(self.config.name.as_str(), None).await?;
        self.client.set(Some(client));
        let Some(kept) = found.kvs().first() else { return Ok(None) };
        Ok(Some((Version(kept.mod_revision().to_string()), serde_json::from_slice(kept.value())?)))
    }

    async fn write(&self, record: &Record, over: Option<&Version>) -> Result<Option<Version>, Trouble> {
        let client = self.connected().await?;
        let key = self.config.name.as_str();
        // A key that does not exist has revision 0.
        let revision: i64 = over.map_or(Ok(0), |version| version.0.parse())?;
        let unchanged = Compare::mod_revision(key, CompareOp::Equal, revision);
        let put = TxnOp::put(key, serde_json::to_vec(record)?, None);
        let done = client.kv_client().txn(Txn::new().when([unchanged]).and_then([put])).await?;
        self.client.set(Some(client));
        // The transaction makes one write, so the store's revision afterwards is that of the write.
        let revision = done.header().map(ResponseHeader::revision);
        Ok(revision.filter(|_| done.succeeded()).map(|revision| Version(revision.to_string())))
    }
}

fn options(config: &ElectionConfig) -> Result<ConnectOptions, EtcdError> {
    let mut options = ConnectOptions::new().with_connect_timeout(CONNECT_DEADLINE);
    if let Some(ca) = &config.ca {
        let mut tls = TlsOptions::new().ca_certificate(Certificate::from_pem(read(ca)?));
        if let (Some(certificate), Some(key)) = (&config.certificate, &config.key) {
            tls = tls.identity(Identity::from_pem(read(certificate)?, read(key)?));
        }
        options = options.with_tls(tls);
    }
    if let (Some(user), Some(file)) = (&config.user, &config.password_file) {
        let password = read(file)?;
        options = options.with_user(user, password.trim_end_matches(['\r', '\n']));
    }
    Ok(options)
}

fn read(path: &Path) -> Result<String, EtcdError> {
    std::fs::read_to_string(path).map_err(|source| EtcdError { path: path.to_owned(), source })
}

/// Time for a connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(1);
