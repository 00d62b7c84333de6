//! What requests belong to.

use std::sync::Arc;

use larder_protocol::TraceContext;

/// What requests belong to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Origin {
    /// The trace.
    pub(crate) trace: Option<TraceContext>,
    /// The engine's name of the request.
    pub(crate) request: Option<Arc<str>>,
}
