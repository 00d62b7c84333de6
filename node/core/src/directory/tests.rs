//! Tests of the directory's parts together.

pub(crate) mod fixtures;
mod simulation;

use super::Changes;
use crate::store::{Change, ChangeKind};
pub(super) use fixtures::*;
