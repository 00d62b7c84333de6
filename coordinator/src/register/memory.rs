//! A register within one process, for tests and as the model of the others.

use std::sync::{Arc, Mutex, PoisonError};

use super::{Register, Trouble};
use crate::election::{Record, Version};

/// A register within one process. Cloning shares.
#[derive(Debug, Clone, Default)]
pub struct Memory(Arc<Mutex<(u64, Option<Record>)>>);

impl Register for Memory {
    async fn read(&self) -> Result<Option<(Version, Record)>, Trouble> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(kept.1.clone().map(|record| (Version(kept.0.to_string()), record)))
    }

    async fn write(&self, record: &Record, over: Option<&Version>) -> Result<Option<Version>, Trouble> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let version = kept.1.is_some().then(|| Version(kept.0.to_string()));
        if version.as_ref() != over {
            return Ok(None);
        }
        *kept = (kept.0 + 1, Some(record.clone()));
        Ok(Some(Version(kept.0.to_string())))
    }
}
