//! Members that were removed after silence and did not come back.

use std::collections::BTreeMap;

use larder_protocol::table::Member;
use rkyv::{Archive, Deserialize, Serialize};

use super::Millis;

/// A member that was removed after long silence.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// The member, as the last table with it showed it.
    pub member: Member,
    /// The time at which it was last heard.
    pub heard: Millis,
    /// The time of its removal.
    pub removed: Millis,
}

/// The lost members that are shown, by name; at most [`MAX_LOST`].
#[derive(Debug, Default)]
pub(super) struct LostMembers(BTreeMap<String, Lost>);

impl LostMembers {
    /// Adds lost members. Forgets members that were removed at least `patience_ms` ago; beyond the limit, forgets the longest
    /// lost.
    pub(super) fn add(&mut self, lost: impl Iterator<Item = Lost>, now: Millis, patience_ms: u64) {
        self.0.extend(lost.map(|lost| (lost.member.name.clone(), lost)));
        self.0.retain(|_, lost| now.saturating_sub(lost.removed) < patience_ms);
        while self.0.len() > MAX_LOST {
            let longest = self.0.iter().min_by_key(|(_, lost)| lost.removed);
            let Some(name) = longest.map(|(name, _)| name.clone()) else { return };
            self.0.remove(&name);
        }
    }

    /// The lost members.
    pub(super) fn all(&self) -> Vec<Lost> {
        self.0.values().cloned().collect()
    }

    /// Forgets a node, which is a member again or will never be one; returns whether it was lost.
    pub(super) fn forget(&mut self, name: &str) -> bool {
        self.0.remove(name).is_some()
    }

    /// The members that were removed within `patience_ms`, and how long each has been silent.
    pub(super) fn since(&self, now: Millis, patience_ms: u64) -> Vec<(Lost, Millis)> {
        let lost = self.0.values().filter(|lost| now.saturating_sub(lost.removed) < patience_ms);
        lost.map(|lost| (lost.clone(), now.saturating_sub(lost.heard))).collect()
    }
}

/// Most lost members that are remembered.
pub const MAX_LOST: usize = 256;
