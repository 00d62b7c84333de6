//! Bounds the verification of chunks that others report as damaged: bytes a second for each reporter, and a burst.
//!
//! A reporter that is right pays nothing, nor does one whose chunk could not be summed.

use std::collections::HashMap;

use crate::Millis;
use crate::store::ids::SessionId;

/// The reporter of a damaged chunk.
#[derive(Debug, Clone, PartialEq, Eq, Hash, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum Reporter {
    /// An engine's session.
    #[strum(serialize = "engine")]
    Session(SessionId),
    /// The node of this name.
    Peer(String),
    /// The actor of this node with this number.
    Sibling(u16),
    /// This actor itself, which looked before it copied blocks to a device.
    DeviceLane,
}

/// Verifications in progress, and the remaining budget of each reporter. A budget begins with `BURST_BYTES`. Each
/// verification takes its bytes, and gives them back unless it finds the chunk whole: only reporters that are wrong run out.
#[derive(Debug, Default)]
pub struct Reports {
    left: HashMap<Reporter, Budget>,
    under_way: usize,
}

#[derive(Debug, Clone, Copy)]
struct Budget {
    bytes: i64,
    at: Millis,
}

impl Reporter {
    /// The reporter's name in metrics.
    pub fn name(&self) -> &'static str {
        self.into()
    }
}

impl Reports {
    /// Whether the limit of verifications at a time is reached.
    pub fn is_full(&self) -> bool {
        self.under_way >= MOST_UNDER_WAY
    }

    /// Whether a chunk may be verified for `by` now.
    pub fn may_begin(&mut self, by: &Reporter, now: Millis) -> bool {
        if self.is_full() {
            return false;
        }
        self.budget(by, now).is_some_and(|budget| budget.bytes > 0)
    }

    /// Begins to verify a chunk of `bytes` bytes for `by`; [`Reports::end`] must follow.
    pub fn begin(&mut self, by: &Reporter, bytes: u64, now: Millis) {
        self.under_way += 1;
        if let Some(budget) = self.budget(by, now) {
            budget.bytes -= cost(bytes);
        }
    }

    /// Ends a verification; `was_wrong` says whether it found the chunk whole.
    pub fn end(&mut self, by: &Reporter, bytes: u64, was_wrong: bool) {
        self.under_way -= 1;
        if let Some(budget) = self.left.get_mut(by).filter(|_| !was_wrong) {
            budget.bytes = (budget.bytes + cost(bytes)).min(BURST_BYTES);
        }
    }

    /// Forgets a session that has ended.
    pub fn forget(&mut self, session: SessionId) {
        self.left.remove(&Reporter::Session(session));
    }

    #[cfg(test)]
    pub(crate) fn reporters(&self) -> usize {
        self.left.len()
    }

    /// The budget that `by` has left; `None` if too many unknown reporters report.
    fn budget(&mut self, by: &Reporter, now: Millis) -> Option<&mut Budget> {
        if !self.left.contains_key(by) {
            if self.left.len() >= MOST_REPORTERS {
                // A reporter with its whole budget is like one that never reported.
                self.left.retain(|_, budget| budget.refilled(now).bytes < BURST_BYTES);
            }
            if self.left.len() >= MOST_REPORTERS {
                return None;
            }
            self.left.insert(by.clone(), Budget { bytes: BURST_BYTES, at: now });
        }
        let budget = self.left.get_mut(by)?;
        *budget = budget.refilled(now);
        Some(budget)
    }
}

impl Budget {
    fn refilled(self, now: Millis) -> Self {
        let more = i64::try_from(now.since(self.at)).unwrap_or(i64::MAX).saturating_mul(BYTES_PER_MS);
        Self { bytes: self.bytes.saturating_add(more).min(BURST_BYTES), at: now.max(self.at) }
    }
}

/// The cost of a verification: finding and claiming a chunk costs something too, however small the chunk is.
fn cost(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX).max(LEAST_COST_BYTES)
}

/// The budget of one reporter at once. The last chunk may exceed it.
const BURST_BYTES: i64 = 256 << 20;

/// The budget that a reporter gains in a millisecond: 32 MB a second take a copy thread about 4 ms.
const BYTES_PER_MS: i64 = 32_000;

/// The least cost of a chunk: a reporter has 30 small chunks verified a second.
const LEAST_COST_BYTES: i64 = 1 << 20;

/// Chunks that are verified at a time.
const MOST_UNDER_WAY: usize = 4;

/// Reporters that are remembered.
const MOST_REPORTERS: usize = 8_192;

#[cfg(test)]
mod tests {
    use super::*;

    const LIAR: Reporter = Reporter::Session(SessionId(1));
    const OTHER: Reporter = Reporter::Session(SessionId(2));

    /// How many chunks of so many bytes a reporter has verified within these milliseconds.
    fn verified(
        reports: &mut Reports,
        by: &Reporter,
        bytes: u64,
        ms: std::ops::Range<u64>,
        is_right: bool,
    ) -> u64 {
        let mut verified = 0;
        for now in ms {
            while verified < 100_000 && reports.may_begin(by, Millis(now)) {
                reports.begin(by, bytes, Millis(now));
                reports.end(by, bytes, !is_right);
                verified += 1;
            }
        }
        verified
    }

    #[test]
    fn a_liar_has_a_few_chunks_verified_a_second_and_takes_nothing_from_others() {
        let mut reports = Reports::default();
        assert_eq!(verified(&mut reports, &LIAR, 4_096, 0..1, false), 256);
        assert!((30..33).contains(&verified(&mut reports, &LIAR, 4_096, 1..1_001, false)));
        assert!(reports.may_begin(&OTHER, Millis(1_001)));
    }

    #[test]
    fn a_reporter_that_is_right_never_runs_out_of_verifications() {
        let mut reports = Reports::default();
        assert_eq!(verified(&mut reports, &LIAR, 1 << 30, 0..1, true), 100_000);
    }

    #[test]
    fn a_chunk_larger_than_all_that_is_left_is_verified_and_paid_for_later() {
        let mut reports = Reports::default();
        assert_eq!(verified(&mut reports, &LIAR, 1 << 30, 0..20_000, false), 1);
        assert_eq!(verified(&mut reports, &LIAR, 1 << 30, 20_000..30_000, false), 1);
    }

    #[test]
    fn few_chunks_are_verified_at_a_time_whoever_asks() {
        let mut reports = Reports::default();
        (0..MOST_UNDER_WAY).for_each(|_| reports.begin(&LIAR, 1, Millis(0)));
        assert!(!reports.may_begin(&OTHER, Millis(0)));
        reports.end(&LIAR, 1, false);
        assert!(reports.may_begin(&OTHER, Millis(0)));
    }

    #[test]
    fn reporters_with_their_whole_budget_make_room_for_others() {
        let mut reports = Reports::default();
        for session in 0..MOST_REPORTERS as u32 {
            assert!(reports.may_begin(&Reporter::Session(SessionId(session)), Millis(0)));
        }
        assert!(reports.may_begin(&Reporter::Sibling(0), Millis(0)));
        assert_eq!(reports.left.len(), 1);
    }
}
