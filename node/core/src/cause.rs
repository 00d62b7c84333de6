//! The cause of some work, if its trace is recorded. Work without a recorded trace carries nothing.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// The span of a request or of a part of its work. It ends with the last [`Cause`] that refers to it.
pub trait Span: Any + Send + Sync {
    /// A new span for a part of the work.
    fn child(&self, name: &'static str) -> Cause;

    /// Records a number under the name `field`.
    fn count(&self, field: &'static str, number: u64);

    /// The span as `Any`: its maker can downcast it.
    fn as_any(&self) -> &dyn Any;
}

/// The cause of some work. A cause that is not recorded is a null pointer.
#[derive(Clone, Default)]
pub struct Cause(Option<Arc<dyn Span>>);

impl Cause {
    /// A recorded cause.
    pub fn new(span: Arc<dyn Span>) -> Self {
        Self(Some(span))
    }

    /// The span of a recorded cause.
    pub fn span(&self) -> Option<&dyn Span> {
        self.0.as_deref()
    }

    /// The cause of a part of the work.
    #[must_use]
    pub fn child(&self, name: &'static str) -> Self {
        self.0.as_ref().map(|span| span.child(name)).unwrap_or_default()
    }

    /// Records a number under the name `field`.
    pub fn count(&self, field: &'static str, number: u64) {
        if let Some(span) = &self.0 {
            span.count(field, number);
        }
    }
}

impl fmt::Debug for Cause {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.0.is_some() { "Cause(recorded)" } else { "Cause" })
    }
}
