//! One file a command.

pub(crate) mod bench;
pub(crate) mod ca;
pub(crate) mod completions;
pub(crate) mod coordinator;
pub(crate) mod dev;
pub(crate) mod doctor;
pub(crate) mod lookup;
pub(crate) mod metrics;
pub(crate) mod node;
pub(crate) mod plan;
pub(crate) mod replay;
pub(crate) mod size;
pub(crate) mod status;
