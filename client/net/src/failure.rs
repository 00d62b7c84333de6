//! An error whose text says everything: no caller tells it from others.

use std::error::Error;

/// A sentence for people, and the error behind it.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct Failure {
    text: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl Failure {
    /// A failure without an error behind it.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), source: None }
    }

    /// A failure because of `source`.
    pub fn because(source: impl Into<Box<dyn Error + Send + Sync>>, text: impl Into<String>) -> Self {
        Self { text: text.into(), source: Some(source.into()) }
    }
}
