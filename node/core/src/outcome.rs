//! The outcome of each chunk of a lookup.

use larder_protocol::session::Tier;

/// The outcome of a chunk in a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ChunkOutcome {
    /// The chunk was found, and can be used.
    Found(Tier),
    /// The chunk was there but of no use: a chunk before it is missing.
    BehindGap(Tier),
    /// The chunk was there, but computing it is faster than bringing it.
    ComputedFaster(Tier),
    /// Nobody looked for the chunk: a token of the prompt must be left to compute, or the engine cannot use a hit.
    NotAsked,
    /// The chunk was being written.
    BeingWritten,
    /// Nobody had the chunk. The record of evictions says whether it was here before.
    #[strum(serialize = "never_stored")]
    Absent,
    /// The home of the chunk's directory rows did not answer: others may have the chunk.
    HomeSilent,
    /// A place of the chunk was known, and the chunk did not come from there.
    NotDelivered(NotDelivered),
    /// The request was refused.
    Refused,
}

/// Why a chunk did not come from its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum NotDelivered {
    /// The holder is not reached, or has not answered lately.
    #[strum(serialize = "peer_silent")]
    Silent,
    /// The chunk did not come before the deadline.
    Deadline,
    /// The holder or this node had too much to do.
    Busy,
    /// The holder no longer has the chunk.
    NotHeld,
    /// The connection broke, or the holder answered something else.
    Broken,
    /// The chunk's bytes were wrong.
    Damaged,
    /// The tier could not read the chunk.
    Unreadable,
}

/// Chunks that follow one another and have one outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutcomeRun {
    /// Position after the last chunk; the run begins where the run before it ends.
    pub to: u32,
    /// The outcome of each of the chunks.
    pub outcome: ChunkOutcome,
}

impl OutcomeRun {
    /// The runs, each with the position of its first chunk.
    pub fn with_starts(runs: &[Self]) -> impl Iterator<Item = (u32, Self)> {
        let starts = std::iter::once(0).chain(runs.iter().map(|run| run.to));
        starts.zip(runs.iter().copied())
    }
}

impl ChunkOutcome {
    /// Whether an engine that asked for the chunk has to compute it.
    pub fn is_miss(self) -> bool {
        !matches!(self, Self::Found(_) | Self::NotAsked)
    }
}

/// Runs of outcomes, one a chunk.
pub(crate) fn runs_of(outcomes: impl IntoIterator<Item = ChunkOutcome>) -> Vec<OutcomeRun> {
    let mut runs = Vec::<OutcomeRun>::new();
    for (to, outcome) in (1..).zip(outcomes) {
        match runs.last_mut() {
            Some(run) if run.outcome == outcome => run.to = to,
            _ => runs.push(OutcomeRun { to, outcome }),
        }
    }
    runs
}
