//! The engine's request to which a session's requests belong.

use std::sync::Arc;

use larder_protocol::TraceContext;

/// The engine's request to which a session's requests belong.
#[derive(Debug, Clone, Default)]
pub(crate) struct Origin {
    /// The trace.
    pub(crate) trace: Option<TraceContext>,
    /// The engine's name of the request.
    pub(crate) request: Option<Arc<str>>,
}
