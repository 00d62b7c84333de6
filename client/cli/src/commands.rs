//! One file a command.

pub(crate) mod bench;
pub(crate) mod ca;
pub(crate) mod completions;
pub(crate) mod config;
pub(crate) mod coordinator;
pub(crate) mod dev;
pub(crate) mod doctor;
pub(crate) mod drain;
pub(crate) mod events;
pub(crate) mod health;
pub(crate) mod list;
pub(crate) mod lookup;
pub(crate) mod man;
pub(crate) mod metrics;
pub(crate) mod node;
pub(crate) mod pin;
pub(crate) mod plan;
pub(crate) mod policy;
pub(crate) mod reload;
pub(crate) mod replay;
pub(crate) mod restart;
pub(crate) mod size;
pub(crate) mod status;
pub(crate) mod top;
pub(crate) mod unpin;
pub(crate) mod r#where;
