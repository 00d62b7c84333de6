//! What the tests of whole processes share: a node as a process, an engine as a process, a session without manners.

pub mod content;
pub mod engine;
pub mod flip;
pub mod model;
pub mod node;
pub mod raw;
pub mod wait;
