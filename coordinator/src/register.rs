//! The register that coordinators share in an election: one record with a version.
//!
//! Any place that keeps the record must do one thing right: of two writes over one version, at most one is done. Its times,
//! watches and expiry do not matter ([`crate::election`]). All backends pass one contract test.

#[cfg(feature = "etcd")]
pub mod etcd;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
mod memory;

use std::error::Error;
use std::time::Duration;

pub use self::memory::Memory;
use crate::election::{Record, RegisterAnswer, RegisterOp, Version};

/// A failure of the place that keeps the record.
pub type Trouble = Box<dyn Error + Send + Sync>;

/// The place that keeps the record.
pub trait Register {
    /// The record and its version; `None` if there is none.
    ///
    /// # Errors
    /// The place does not answer, or keeps something else under this name.
    ///
    /// # Cancel safety
    /// Safe.
    fn read(&self) -> impl Future<Output = Result<Option<(Version, Record)>, Trouble>>;

    /// Writes the record over this version of it, or over nothing. Returns the new version; `None` if the record has another
    /// version.
    ///
    /// # Errors
    /// It is unknown whether the record was written.
    ///
    /// # Cancel safety
    /// If the future is dropped, it is unknown whether the record was written.
    fn write(
        &self,
        record: &Record,
        over: Option<&Version>,
    ) -> impl Future<Output = Result<Option<Version>, Trouble>>;
}

/// Asks a register, and waits at most `deadline` for the answer.
pub(crate) async fn ask(register: &impl Register, ask: &RegisterOp, deadline: Duration) -> RegisterAnswer {
    let asked = async {
        Ok::<_, Trouble>(match ask {
            RegisterOp::Read => RegisterAnswer::Found(register.read().await?),
            RegisterOp::Write(record, over) => register
                .write(record, over.as_ref())
                .await?
                .map_or(RegisterAnswer::Conflict, RegisterAnswer::Written),
        })
    };
    match tokio::time::timeout(deadline, asked).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => {
            let causes =
                std::iter::successors(Some(&*error as &(dyn Error + 'static)), |&error| error.source());
            let error = causes.map(ToString::to_string).collect::<Vec<_>>().join(": ");
            tracing::warn!(error, "the election's register answers with an error");
            RegisterAnswer::Failed
        }
        Err(_) => {
            tracing::warn!(?deadline, "the election's register does not answer in time");
            RegisterAnswer::Failed
        }
    }
}
