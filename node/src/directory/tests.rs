//! Tests of the directory in the node.

#[path = "../../core/src/directory/tests/fixtures.rs"]
mod fixtures;
mod panics;

use larder_core::directory::Changes;
use larder_core::store::{Change, ChangeKind};

pub(crate) use fixtures::*;
