//! The policy's state of each cached chunk, and the list of the chunks that may be evicted.

use super::kinds::Kind;
use crate::store::ids::ChunkNumber;

/// A moment on both clocks. The clocks wrap around.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Moment {
    /// Wall time, in units of [`UNIT_MS`].
    pub(super) wall: u32,
    /// Uses of any chunk.
    pub(super) uses: u32,
}

/// Milliseconds of a unit of wall time: the clock wraps around after two years.
pub(super) const UNIT_MS: u64 = 16;

/// One chunk. 20 bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ChunkState {
    /// Its last use.
    pub(super) used: Moment,
    /// 32 bits of its hash.
    pub(super) hash: u32,
    /// The chunk's place among the chunks that may be evicted, from 1 on; 0 if it may not be evicted.
    free_at: u32,
    /// The lowest bits of its place in its prompt.
    pub(super) index: u16,
    /// Its kind; the default value if the chunk is not here.
    pub(super) kind: Kind,
}

/// All chunks.
#[derive(Debug, Default)]
pub(super) struct State {
    nodes: Vec<ChunkState>,
    free: Vec<ChunkNumber>,
    len: usize,
}

impl Moment {
    /// The time since an earlier moment; 0 if that moment is not earlier.
    pub(super) fn since(self, earlier: Self) -> Self {
        let since = |now: u32, then: u32| {
            let units = now.wrapping_sub(then);
            // A caller's clock may lag behind.
            if units > u32::MAX - (1 << 16) { 0 } else { units }
        };
        Self { wall: since(self.wall, earlier.wall), uses: since(self.uses, earlier.uses) }
    }
}

impl ChunkState {
    /// The state of a chunk that is used now.
    pub(super) fn new(used: Moment, hash: u32, index: u16, kind: Kind) -> Self {
        Self { used, hash, free_at: 0, index, kind }
    }
}

impl State {
    /// Adds a chunk that may be evicted.
    pub(super) fn insert(&mut self, chunk: ChunkNumber, node: ChunkState) {
        if self.nodes.len() <= chunk.position() {
            self.nodes.resize(chunk.position() + 1, ChunkState::default());
        }
        debug_assert!(self.known(chunk).is_none(), "a chunk is inserted once");
        self.nodes[chunk.position()] = node;
        self.len += 1;
        self.unblock(chunk);
    }

    /// Takes a chunk out.
    pub(super) fn remove(&mut self, chunk: ChunkNumber) -> ChunkState {
        if self.is_free(chunk) {
            self.block(chunk);
        }
        self.len -= 1;
        std::mem::take(&mut self.nodes[chunk.position()])
    }

    /// The state of a cached chunk.
    pub(super) fn node(&self, chunk: ChunkNumber) -> &ChunkState {
        &self.nodes[chunk.position()]
    }

    pub(super) fn node_mut(&mut self, chunk: ChunkNumber) -> &mut ChunkState {
        &mut self.nodes[chunk.position()]
    }

    /// The state of a chunk, if it is cached.
    pub(super) fn known(&self, chunk: ChunkNumber) -> Option<&ChunkState> {
        self.nodes.get(chunk.position()).filter(|node| node.kind != Kind::default())
    }

    /// Notes that a chunk may not be evicted.
    pub(super) fn block(&mut self, chunk: ChunkNumber) {
        debug_assert!(self.is_free(chunk), "a chunk is blocked once");
        let place = std::mem::take(&mut self.node_mut(chunk).free_at) as usize - 1;
        self.free.swap_remove(place);
        if let Some(&moved) = self.free.get(place) {
            self.node_mut(moved).free_at = place as u32 + 1;
        }
    }

    /// Notes that a chunk may be evicted.
    pub(super) fn unblock(&mut self, chunk: ChunkNumber) {
        debug_assert!(!self.is_free(chunk), "a chunk is unblocked after it was blocked");
        self.free.push(chunk);
        self.node_mut(chunk).free_at = self.free.len() as u32;
    }

    /// Whether a chunk is here and may be evicted.
    pub(super) fn is_free(&self, chunk: ChunkNumber) -> bool {
        self.node(chunk).free_at > 0
    }

    /// The chunks that may be evicted, in no order.
    pub(super) fn free(&self) -> &[ChunkNumber] {
        &self.free
    }

    /// Every chunk, blocked chunks included.
    pub(super) fn iter(&self) -> impl Iterator<Item = (ChunkNumber, &ChunkState)> {
        let all = self.nodes.iter().enumerate().filter(|(_, node)| node.kind != Kind::default());
        all.map(|(place, node)| (ChunkNumber::at(place), node))
    }

    /// The number of chunks here, blocked chunks included.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_takes_20_bytes() {
        assert_eq!(size_of::<ChunkState>(), 20);
    }

    #[test]
    fn only_present_chunks_that_are_not_blocked_may_be_evicted() {
        let mut rng = fastrand::Rng::with_seed(5);
        let (mut state, mut model) = (State::default(), [None::<bool>; 40]);
        for _ in 0..5_000 {
            let place = rng.usize(..model.len());
            let chunk = ChunkNumber::at(place);
            match (model[place], rng.u8(..3)) {
                (None, _) => {
                    state.insert(chunk, ChunkState::new(Moment::default(), place as u32, 0, Kind::FIRST));
                    model[place] = Some(true);
                }
                (Some(_), 0) => {
                    assert_eq!(state.remove(chunk).hash, place as u32);
                    model[place] = None;
                }
                (Some(true), _) => {
                    state.block(chunk);
                    model[place] = Some(false);
                }
                (Some(false), _) => {
                    state.unblock(chunk);
                    model[place] = Some(true);
                }
            }
            let mut free: Vec<usize> = state.free().iter().map(|chunk| chunk.position()).collect();
            free.sort_unstable();
            let expected: Vec<usize> = (0..model.len()).filter(|&place| model[place] == Some(true)).collect();
            assert_eq!(free, expected);
            assert_eq!(state.len(), model.iter().flatten().count());
        }
    }

    #[test]
    fn elapsed_time_survives_a_wrap_of_the_clock_and_is_never_negative() {
        let moment = |wall, uses| Moment { wall, uses };
        assert_eq!(moment(5, 9).since(moment(u32::MAX - 4_000_000, 4)), moment(4_000_006, 5));
        assert_eq!(moment(5, 9).since(moment(7, 9)), moment(0, 0));
    }
}
