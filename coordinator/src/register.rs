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

use larder_protocol::limits::MAX_TERM;

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

/// The register has a record that no coordinator can have written. After its term there would be no further one.
#[derive(Debug, thiserror::Error)]
#[error(
    "the election's record has the impossible term {0}: delete the record, and a coordinator makes it again; of a Lease, delete the annotation larder/record and spec.holderIdentity"
)]
struct Implausible(u64);

/// Asks a register, and waits at most `deadline` for the answer.
pub(crate) async fn ask(register: &impl Register, ask: &RegisterOp, deadline: Duration) -> RegisterAnswer {
    let asked = async {
        Ok::<_, Trouble>(match ask {
            RegisterOp::Read => {
                let found = register.read().await?;
                match &found {
                    Some((_, record)) if record.term >= MAX_TERM => {
                        return Err(Implausible(record.term).into());
                    }
                    _ => RegisterAnswer::Found(found),
                }
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_an_impossible_term_is_no_answer() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let register = Memory::default();
            let mut version = None;
            for (term, is_believed) in [(MAX_TERM - 1, true), (MAX_TERM, false), (u64::MAX, false)] {
                let record = Record { term, ..Record::default() };
                version = register.write(&record, version.as_ref()).await.unwrap();
                let answer = ask(&register, &RegisterOp::Read, Duration::from_secs(30)).await;
                assert_eq!(answer != RegisterAnswer::Failed, is_believed, "{term}");
            }
        });
    }
}
