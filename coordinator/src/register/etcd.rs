//! A register in etcd: one key, compared by its revision.
//!
//! It speaks with one of etcd's members at a time, and with the next one after a failure. A client that spread its questions over
//! all members would ask a member that hangs again and again, and a leader that waits for it in vain loses its lease.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::Duration;

use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, Identity, KvClient, ResponseHeader, TlsOptions,
    Txn, TxnOp,
};

use super::{Register, Trouble};
use crate::config::ElectionConfig;
use crate::election::{Record, Version};

/// A key in etcd.
pub struct Etcd {
    config: ElectionConfig,
    /// The connection; none after a failure. The next question then connects with the files of that time.
    client: Cell<Option<Client>>,
    /// How often it has connected: each time to the next member.
    connects: Cell<usize>,
}

/// Why etcd does not serve as a register.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// etcd refuses, or does not answer.
    #[error("etcd at {endpoint} does not serve the key {key}{}", hint(source))]
    Refused {
        /// The member.
        endpoint: String,
        /// The key.
        key: String,
        /// etcd's answer, or why there is none.
        source: Box<etcd_client::Error>,
    },
    /// The key has another value than a record.
    #[error(
        "the key {key} of etcd has a value that no coordinator wrote: set `[election] name` to another key, or delete this one"
    )]
    Foreign {
        /// The key.
        key: String,
        /// The fault of the value.
        source: serde_json::Error,
    },
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
        Ok(Self { config: config.clone(), client: Cell::default(), connects: Cell::default() })
    }

    /// Asks over the connection, or over a new one. After a failure the connection is gone.
    async fn ask<T>(
        &self,
        ask: impl AsyncFnOnce(&mut KvClient) -> Result<T, etcd_client::Error>,
    ) -> Result<T, Trouble> {
        let client = match self.client.take() {
            Some(client) => Ok(client),
            None => {
                let options = options(&self.config)?;
                self.connects.set(self.connects.get().wrapping_add(1));
                Box::pin(Client::connect([self.member()], Some(options))).await
            }
        };
        let asked = match client {
            Ok(client) => {
                let asked = Box::pin(ask(&mut client.kv_client())).await;
                self.client.set(Some(client).filter(|_| asked.is_ok()));
                asked
            }
            Err(error) => Err(error),
        };
        asked.map_err(|error| {
            let (endpoint, key) = (self.member().to_owned(), self.config.name.clone());
            KeyError::Refused { endpoint, key, source: Box::new(error) }.into()
        })
    }

    /// The member that this coordinator connected to last.
    fn member(&self) -> &str {
        let members = self.config.endpoints.as_deref().unwrap_or_default();
        let at = self.connects.get().wrapping_sub(1).checked_rem(members.len());
        at.map_or("", |at| &members[at])
    }
}

impl Register for Etcd {
    async fn read(&self) -> Result<Option<(Version, Record)>, Trouble> {
        let key = self.config.name.as_str();
        let found = self.ask(async |client| client.get(key, None).await).await?;
        let Some(kept) = found.kvs().first() else { return Ok(None) };
        let record = serde_json::from_slice(kept.value());
        let record = record.map_err(|source| KeyError::Foreign { key: key.to_owned(), source })?;
        Ok(Some((Version(kept.mod_revision().to_string()), record)))
    }

    async fn write(&self, record: &Record, over: Option<&Version>) -> Result<Option<Version>, Trouble> {
        let key = self.config.name.as_str();
        // A key that does not exist has revision 0.
        let revision: i64 = over.map_or(Ok(0), |version| version.0.parse())?;
        let unchanged = Compare::mod_revision(key, CompareOp::Equal, revision);
        let put = TxnOp::put(key, serde_json::to_vec(record)?, None);
        let write = Txn::new().when([unchanged]).and_then([put]);
        let done = self.ask(async |client| client.txn(write).await).await?;
        // The transaction makes one write, so the store's revision afterwards is that of the write.
        let revision = done.header().map(ResponseHeader::revision);
        Ok(revision.filter(|_| done.succeeded()).map(|revision| Version(revision.to_string())))
    }
}

/// What to do about etcd's refusal.
fn hint(refusal: &etcd_client::Error) -> &'static str {
    let etcd_client::Error::GRpcStatus(status) = refusal else { return "" };
    let hints = [
        ("user name is empty", ": set `[election] user` and `password_file`, since it wants a user"),
        ("invalid user ID or password", ": set `[election] user` and the content of `password_file` right"),
        ("permission denied", ": give the user the right to read and write this key"),
        (
            "database space exceeded",
            ": it is full; compact and defragment it, disarm its alarm (`etcdctl alarm disarm`), and let it compact itself (`--auto-compaction-retention`)",
        ),
    ];
    hints.iter().find(|(said, _)| status.message().contains(said)).map_or("", |(_, hint)| hint)
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
