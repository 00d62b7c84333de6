//! The client against a scripted node.
#![expect(clippy::unwrap_used, reason = "what fails in a test's fixture fails the test")]

mod calls;
mod closing;
mod concurrent;
mod dropped;
mod fake_node;
mod foreign;
mod get;
mod gpu;
mod pools;
mod put;
mod traced;
mod verify;
mod versions;
