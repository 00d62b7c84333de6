//! Tests of commits, handed-over layers, and chunks reported as damaged: the results of copies that succeed, fail or never end.

use larder_protocol::handoff::HandOver;
use larder_protocol::session::{Checked, Commit, ReportDamage, Reserve, Reserved, Scarce};

use super::*;
use crate::reports::Reporter;
use crate::{CopyAnswer, CopyNumber};

impl World {
    pub(super) fn reserve(&mut self, word: &str) -> Reserved {
        let ask = Reserve {
            namespace: self.namespace,
            chain: self.chain(word),
            pools: Vec::new(),
            priority: 0,
            attempt: 0,
        };
        let request = self.asks(self.session, Request::Reserve(ask));
        match self.answered(request) {
            Response::Reserved(reserved) => reserved,
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn commit(&mut self, Reserved { reservation, chunks, .. }: &Reserved) -> RequestId {
        let (chunks, sources) = (chunks.clone(), vec![0; chunks.len()]);
        self.asks(self.session, Request::Commit(Commit { reservation: *reservation, chunks, sources }))
    }

    /// Takes the next effect, which must copy so many blocks.
    pub(super) fn copy(&mut self, blocks: usize) -> CopyNumber {
        match self.next() {
            Effect::Copy { copy, moves, .. } if moves.len() == blocks => copy,
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn copied(&mut self, copy: CopyNumber, blocks: usize) {
        let sums = vec![Checksums::default(); blocks];
        self.tell(Event::Copied { copy, answer: CopyAnswer::Done(sums) });
    }

    /// The number of a word's chunks that are here.
    pub(super) fn held(&mut self, word: &str) -> u32 {
        let request = self.lease(word);
        let leased = self.leased(request);
        if leased.lease != 0 {
            self.asks(self.session, Request::Release(leased.lease));
        }
        leased.chunks
    }

    pub(super) fn report(&mut self, word: &str) -> RequestId {
        let (namespace, hash) = (self.namespace, name(word));
        self.asks(self.session, Request::ReportDamage(ReportDamage { namespace, hash }))
    }

    pub(super) fn checked(&mut self, of: RequestId) -> Checked {
        match self.answered(of) {
            Response::Checked(found) => found,
            other => panic!("{other:?}"),
        }
    }
}

pub(super) const ALONE: Sources =
    Sources { siblings: None, peers: None, disk: None, object: None, known_chunks: 0 };

#[test]
fn a_commit_is_answered_when_its_bytes_are_copied_and_nobody_sees_them_before() {
    let mut w = World::new(ALONE);
    let reserved = w.reserve("ab");
    assert!(reserved.places.is_empty(), "the engine is not trusted to write there");
    let request = w.commit(&reserved);
    let copy = w.copy(2);
    assert_eq!(w.held("ab"), 0);
    w.copied(CopyNumber(copy.0 + 1), 2);
    assert!(w.is_idle(), "that is another copy");
    w.copied(copy, 2);
    assert_eq!(w.answered(request), Response::Committed(2));
    w.copied(copy, 2);
    assert!(w.is_idle(), "it has ended");
    assert_eq!(w.held("ab"), 2);
}

#[test]
fn a_commit_that_cannot_be_copied_now_can_be_made_again() {
    let mut w = World::new(ALONE);
    let reserved = w.reserve("ab");
    let request = w.commit(&reserved);
    let copy = w.copy(2);
    w.tell(Event::Copied { copy, answer: CopyAnswer::Busy });
    assert!(matches!(w.refused(request), Refused::Busy { what: Scarce::Memory, .. }));
    let request = w.commit(&reserved);
    let copy = w.copy(2);
    w.copied(copy, 2);
    assert_eq!(w.answered(request), Response::Committed(2));
}

#[test]
fn what_a_failed_copy_was_to_bring_is_not_there_and_its_room_is_free() {
    for answer in [CopyAnswer::Failed, CopyAnswer::Impossible] {
        let mut w = World::new(ALONE);
        let reserved = w.reserve("ab");
        let request = w.commit(&reserved);
        let copy = w.copy(2);
        w.tell(Event::Copied { copy, answer: answer.clone() });
        match answer {
            CopyAnswer::Failed => assert_eq!(w.answered(request), Response::Committed(0)),
            _ => assert_eq!(w.refused(request), Refused::Internal),
        }
        assert_eq!(w.held("ab"), 0);
        let reserved = w.reserve("abcdefgh");
        assert_eq!(reserved.chunks.len(), 8);
    }
}

#[test]
fn a_session_that_ends_while_its_commit_is_copied_leaves_nothing() {
    let mut w = World::new(ALONE);
    let reserved = w.reserve("ab");
    w.commit(&reserved);
    let copy = w.copy(2);
    let other = w.other_session();
    let ended = std::mem::replace(&mut w.session, other);
    w.tell(Event::Closed(ended));
    w.copied(copy, 2);
    let Effect::Answer { response, .. } = w.next() else { panic!("nobody hears it") };
    assert_eq!(response, Response::Committed(0));
    assert_eq!(w.held("ab"), 0);
}

#[test]
fn layers_of_a_commit_that_was_given_up_are_refused() {
    let mut w = World::new(ALONE);
    let Reserved { reservation, chunks, .. } = w.reserve("a");
    let layers = HandOver { reservation, chunks, pool: 0, from_layer: 0, to_layer: 1, sources: vec![0] };
    let request = w.asks(w.session, Request::HandOver(layers));
    let copy = w.copy(1);
    let aborted = w.asks(w.session, Request::Abort(reservation));
    assert_eq!(w.answered(aborted), Response::Aborted);
    w.copied(copy, 1);
    assert!(matches!(w.refused(request), Refused::Unknown { .. }));
}

#[test]
fn a_chunk_that_is_wrong_is_dropped_and_one_that_is_right_stays() {
    let mut w = World::new(ALONE);
    w.put("ab");
    let request = w.report("ab");
    let copy = w.copy(1);
    w.copied(copy, 1);
    assert_eq!(w.checked(request), Checked::Right);
    assert_eq!(w.held("ab"), 2);
    let request = w.report("ab");
    let copy = w.copy(1);
    let wrong = Checksums { whole: 7, ..Checksums::default() };
    w.tell(Event::Copied { copy, answer: CopyAnswer::Done(vec![wrong]) });
    assert_eq!(w.checked(request), Checked::Damaged);
    assert!(matches!(w.next(), Effect::Condemned { keys, .. } if keys.len() == 1));
    assert_eq!(w.held("ab"), 1);
}

#[test]
fn a_report_of_what_is_not_here_is_answered_at_once_and_one_too_many_is_put_off() {
    let mut w = World::new(ALONE);
    let request = w.report("z");
    assert_eq!(w.checked(request), Checked::Nothing);
    w.put("abcde");
    let words = ["a", "ab", "abc", "abcd"];
    let under_way: Vec<(RequestId, CopyNumber)> =
        words.iter().map(|word| (w.report(word), w.copy(1))).collect();
    let refused = w.report("abcde");
    assert!(matches!(w.refused(refused), Refused::Busy { what: Scarce::Claims, .. }));
    for (request, copy) in under_way {
        w.tell(Event::Copied { copy, answer: CopyAnswer::Busy });
        assert!(matches!(w.refused(request), Refused::Busy { .. }), "the copy pool is full");
    }
    let request = w.report("abcde");
    let copy = w.copy(1);
    w.copied(copy, 1);
    assert_eq!(w.checked(request), Checked::Right);
}

#[test]
fn all_chunks_that_a_peer_reports_are_verified_a_few_at_a_time() {
    let mut w = World::new(ALONE);
    w.put("abcdefgh");
    let hashes = (1..=8).map(|end| name(&"abcdefgh"[..end])).collect();
    w.tell(Event::Damaged { by: Reporter::Peer("b".to_owned()), fingerprint: w.fingerprint, hashes });
    let mut verified = 0;
    let mut open: Vec<CopyNumber> = (0..4).map(|_| w.copy(1)).collect();
    assert!(w.is_idle(), "four at a time");
    while let Some(copy) = open.pop() {
        verified += 1;
        w.copied(copy, 1);
        if verified <= 4 {
            open.push(w.copy(1));
        }
    }
    assert_eq!(verified, 8);
    assert!(w.is_at_rest());
}

#[test]
fn after_a_fault_copies_of_the_life_before_mean_nothing() {
    let mut w = World::new(ALONE);
    let reserved = w.reserve("a");
    w.commit(&reserved);
    let copy = w.copy(1);
    w.core.begin_anew();
    w.session = w.other_session();
    w.copied(copy, 1);
    assert!(w.is_idle());
    let request = w.report("a");
    assert_eq!(w.checked(request), Checked::Nothing, "numbers of reports begin anew");
}

#[test]
fn a_report_whose_chunk_cannot_be_summed_costs_nothing() {
    let mut w = World::new(ALONE);
    w.put("a");
    for _ in 0..300 {
        let request = w.report("a");
        let copy = w.copy(1);
        w.tell(Event::Copied { copy, answer: CopyAnswer::Busy });
        assert!(matches!(w.refused(request), Refused::Busy { .. }));
    }
    let request = w.report("a");
    let copy = w.copy(1);
    w.copied(copy, 1);
    assert_eq!(w.checked(request), Checked::Right);
}

#[test]
fn what_a_session_reported_falsely_is_forgotten_with_it() {
    let mut w = World::new(ALONE);
    w.put("a");
    let session = w.session;
    for _ in 0..3 {
        let request = w.report("a");
        let copy = w.copy(1);
        w.copied(copy, 1);
        assert_eq!(w.checked(request), Checked::Right);
    }
    assert_eq!(w.core.copies.reports.reporters(), 1);
    w.tell(Event::Closed(session));
    assert_eq!(w.core.copies.reports.reporters(), 0);
}

#[test]
fn a_tenant_whose_copies_fill_its_part_of_the_queue_leaves_the_rest_to_others() {
    let mut w = World::with(StoreLimits { extents: 64, disk: None, object: None, ..limits() }, ALONE);
    let reserved = [w.reserve("abcdefghijklmnopqrstuvwxyz"), w.reserve("ABCDEFGHIJKLMNOPQRSTUVWXYZ")];
    let commit = |w: &mut World, chunk: u32| {
        let reservation = reserved[chunk as usize / 26].reservation;
        w.asks(w.session, Request::Commit(Commit { reservation, chunks: vec![chunk % 26], sources: vec![0] }))
    };
    let copies: Vec<CopyNumber> = (0..48)
        .map(|chunk| {
            commit(&mut w, chunk);
            w.copy(1)
        })
        .collect();
    let refused = commit(&mut w, 48);
    assert!(matches!(w.refused(refused), Refused::Busy { what: Scarce::Memory, .. }));
    let own = (w.session, w.namespace, w.root);
    w.session = w.core.open_session(TenantId(1), ProcessId(9), 1 << 20);
    let theirs = w.core.register(w.session, &spec(1), &[0], &[BLOCK]).unwrap();
    (w.namespace, w.root) = (theirs.namespace, theirs.root);
    let of_other = w.reserve("ab");
    w.commit(&of_other);
    w.copy(2);
    (w.session, w.namespace, w.root) = own;
    w.copied(copies[0], 1);
    while !matches!(w.next(), Effect::Answer { response: Response::Committed(1), .. }) {}
    commit(&mut w, 48);
    w.copy(1);
}

#[test]
fn bytes_whose_copy_failed_do_not_count_as_committed() {
    for (answer, counts) in [(CopyAnswer::Failed, 0), (CopyAnswer::Done(vec![Checksums::default()]), 1)] {
        let mut w = World::new(ALONE);
        let reserved = w.reserve("a");
        w.commit(&reserved);
        let copy = w.copy(1);
        w.tell(Event::Copied { copy, answer });
        let is_counted = |effect: &Effect| matches!(effect, Effect::Count(Counted::Committed(_)));
        assert_eq!(std::iter::from_fn(|| w.core.poll_effect()).filter(is_counted).count(), counts);
    }
}
