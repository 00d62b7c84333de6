//! A register in etcd: one key, compared by its revision.

use std::time::Duration;

use etcd_client::{Client, Compare, CompareOp, ConnectOptions, ResponseHeader, Txn, TxnOp};

use super::{Register, Trouble};
use crate::election::{Record, Version};

/// A key in etcd.
pub struct Etcd {
    client: Client,
    key: String,
}

impl Etcd {
    /// Uses this key of the etcd cluster at these endpoints. It connects when it is asked.
    ///
    /// # Errors
    /// An endpoint is no URL.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn new(endpoints: &[String], key: String) -> Result<Self, Trouble> {
        let options = ConnectOptions::new().with_connect_timeout(CONNECT_DEADLINE);
        let client = Client::connect(endpoints, Some(options)).await?;
        Ok(Self { client, key })
    }
}

impl Register for Etcd {
    async fn read(&self) -> Result<Option<(Version, Record)>, Trouble> {
        let found = self.client.kv_client().get(self.key.as_str(), None).await?;
        let Some(kept) = found.kvs().first() else { return Ok(None) };
        Ok(Some((Version(kept.mod_revision().to_string()), serde_json::from_slice(kept.value())?)))
    }

    async fn write(&self, record: &Record, over: Option<&Version>) -> Result<Option<Version>, Trouble> {
        // A key that does not exist has revision 0.
        let revision: i64 = over.map_or(Ok(0), |version| version.0.parse())?;
        let unchanged = Compare::mod_revision(self.key.as_str(), CompareOp::Equal, revision);
        let put = TxnOp::put(self.key.as_str(), serde_json::to_vec(record)?, None);
        let done = self.client.kv_client().txn(Txn::new().when([unchanged]).and_then([put])).await?;
        // The store's revision after the transaction is that of its one write.
        let revision = done.header().map(ResponseHeader::revision);
        Ok(revision.filter(|_| done.succeeded()).map(|revision| Version(revision.to_string())))
    }
}

/// How long a connection may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(1);
