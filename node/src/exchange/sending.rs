//! Who may have how much of what is being sent.
//!
//! Pure. Nobody has a fixed share: a peer may have as much under way as is left free for the others. The first gets half of
//! all, whoever comes next half of the rest. So peers that stop reading never have everything.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// Bytes that are being sent, by peer. Cloning shares.
#[derive(Debug, Clone)]
pub(super) struct Sending(Rc<RefCell<State>>);

#[derive(Debug)]
struct State {
    all_bytes: u64,
    free_bytes: u64,
    by_peer: HashMap<String, u64>,
}

/// Bytes that may be sent, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    sending: Sending,
    peer: String,
    bytes: u64,
}

impl Sending {
    /// Nothing is being sent; so many bytes may be, to all together.
    pub(super) fn new(all_bytes: u64) -> Self {
        Self(Rc::new(RefCell::new(State { all_bytes, free_bytes: all_bytes, by_peer: HashMap::new() })))
    }

    /// A place for a chunk to a peer, which leaves `kept_free` bytes; `None` where there is none now. Who has none under way
    /// gets one wherever there is room, however large the chunk is.
    pub(super) fn place(&self, peer: &str, bytes: u64, kept_free: u64) -> Option<Place> {
        let state = &mut *self.0.borrow_mut();
        // A chunk larger than all that may be sent goes alone.
        let bytes = bytes.min(state.all_bytes);
        let free = state.free_bytes.checked_sub(bytes)?;
        let has = state.by_peer.get(peer).copied().unwrap_or(0);
        let is_first = has == 0;
        if free < kept_free.min(state.all_bytes - bytes) || !(is_first || has + bytes <= free) {
            return None;
        }
        state.free_bytes = free;
        *state.by_peer.entry(peer.to_owned()).or_default() += bytes;
        Some(Place { sending: self.clone(), peer: peer.to_owned(), bytes })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let state = &mut *self.sending.0.borrow_mut();
        state.free_bytes += self.bytes;
        if let Some(has) = state.by_peer.get_mut(&self.peer) {
            *has = has.saturating_sub(self.bytes);
            if *has == 0 {
                state.by_peer.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As many places of 1 byte as a peer gets.
    fn fill(sending: &Sending, peer: &str) -> Vec<Place> {
        std::iter::from_fn(|| sending.place(peer, 1, 0)).collect()
    }

    #[test]
    fn peers_that_stop_reading_leave_room_for_the_next() {
        let sending = Sending::new(1_000);
        let stuck: Vec<Vec<Place>> = ["a", "b", "c", "d"].map(|peer| fill(&sending, peer)).into();
        let has: Vec<usize> = stuck.iter().map(Vec::len).collect();
        assert_eq!(has, [500, 250, 125, 62]);
        assert_eq!(fill(&sending, "e").len(), 31, "the next one still gets half of the rest");
        drop(stuck);
        assert_eq!(fill(&sending, "e").len(), 500);
    }

    #[test]
    fn a_chunk_of_any_size_goes_to_a_peer_that_has_nothing() {
        let sending = Sending::new(1_000);
        let large = sending.place("a", 5_000, 250).expect("it goes alone");
        assert!(sending.place("b", 1, 0).is_none());
        drop(large);
        let most = sending.place("a", 800, 0);
        assert!(most.is_some() && sending.place("a", 1, 0).is_none() && sending.place("b", 200, 0).is_some());
    }

    #[test]
    fn what_is_only_prefetched_leaves_some_free() {
        let sending = Sending::new(1_000);
        let urgent = sending.place("a", 400, 0);
        assert!(urgent.is_some() && sending.place("b", 400, 250).is_none());
        assert!(sending.place("b", 350, 250).is_some());
    }

    #[test]
    fn nothing_is_kept_of_peers_that_have_nothing_under_way() {
        let sending = Sending::new(1_000);
        for peer in 0..100 {
            drop(sending.place(&peer.to_string(), 10, 0));
        }
        let state = sending.0.borrow();
        assert_eq!((state.free_bytes, state.by_peer.len()), (1_000, 0));
    }
}
