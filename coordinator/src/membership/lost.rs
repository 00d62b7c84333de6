//! Members that were removed after silence and did not come back.

use std::collections::{BTreeMap, VecDeque};

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

/// All lost members, by name; at most [`MAX_LOST`].
#[derive(Debug, Default)]
pub(super) struct LostMembers {
    lost: BTreeMap<String, Lost>,
    /// The lives of nodes that an admin had forgotten, the last ones at the end; at most [`MAX_LOST`]. A life that goes on, cut off
    /// from the coordinator, is still void.
    void: VecDeque<(String, u64)>,
}

impl LostMembers {
    /// Adds lost members. Forgets members that were removed at least `patience_ms` ago; beyond the limit, forgets the longest
    /// lost.
    pub(super) fn add(&mut self, lost: impl Iterator<Item = Lost>, now: Millis, patience_ms: u64) {
        self.lost.extend(lost.map(|lost| (lost.member.name.clone(), lost)));
        self.lost.retain(|_, lost| now.saturating_sub(lost.removed) < patience_ms);
        while self.lost.len() > MAX_LOST {
            let longest = self.lost.iter().min_by_key(|(_, lost)| lost.removed);
            let Some(name) = longest.map(|(name, _)| name.clone()) else { return };
            self.lost.remove(&name);
        }
    }

    /// Whether this incarnation of a node is lost, or was when an admin had it forgotten.
    pub(super) fn has_life(&self, name: &str, incarnation: u64) -> bool {
        self.lost.get(name).is_some_and(|lost| lost.member.incarnation == incarnation)
            || self.void.iter().any(|(of, void)| of == name && *void == incarnation)
    }

    /// The lost members.
    pub(super) fn all(&self) -> Vec<Lost> {
        self.lost.values().cloned().collect()
    }

    /// Forgets a node that is a member again.
    pub(super) fn forget(&mut self, name: &str) {
        self.lost.remove(name);
        self.void.retain(|(of, _)| of != name);
    }

    /// Forgets a node that will never be a member again; returns whether it was lost.
    pub(super) fn give_up(&mut self, name: &str) -> bool {
        let Some(lost) = self.lost.remove(name) else { return false };
        if self.void.len() == MAX_LOST {
            self.void.pop_front();
        }
        self.void.push_back((name.to_owned(), lost.member.incarnation));
        true
    }

    /// The members that were removed within `patience_ms`, and how long each has been silent.
    pub(super) fn since(&self, now: Millis, patience_ms: u64) -> Vec<(Lost, Millis)> {
        let lost = self.lost.values().filter(|lost| now.saturating_sub(lost.removed) < patience_ms);
        lost.map(|lost| (lost.clone(), now.saturating_sub(lost.heard))).collect()
    }
}

/// Most lost members that are remembered.
pub const MAX_LOST: usize = 256;

#[cfg(test)]
mod tests {
    use larder_protocol::table::{MemberState, NodeNumber};

    use super::*;

    fn lost(name: &str) -> Lost {
        let member = Member {
            number: NodeNumber(1),
            name: name.to_owned(),
            incarnation: 7,
            peer: ([127, 0, 0, 1], 1).into(),
            http: ([127, 0, 0, 1], 2).into(),
            devices: 1,
            weight: 1,
            state: MemberState::Alive,
        };
        Lost { member, heard: 0, removed: 0 }
    }

    #[test]
    fn the_last_forgotten_lives_stay_void_however_many_were_forgotten_before() {
        let mut members = LostMembers::default();
        let name = |number| format!("node-{number}");
        for number in 0..=MAX_LOST {
            members.add([lost(&name(number))].into_iter(), 0, 1);
            assert!(members.give_up(&name(number)));
        }
        assert!(!members.has_life(&name(0), 7) && members.has_life(&name(1), 7));
        assert!(members.has_life(&name(MAX_LOST), 7));
    }
}
