//! The client against a scripted node.

mod closing;
mod concurrent;
mod dropped;
mod fake_node;
mod get;
mod mapping;
mod put;
mod socket;
