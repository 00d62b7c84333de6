//! Orders copies and checksums of bytes: of commits, handed-over layers, chunks reported as damaged, and blocks that a device
//! copies.
//!
//! **A put** in order:
//!
//! 1. A session reserves chunks, and the store takes slots for all missing blocks ([`Store::reserve`]).
//! 2. The engine writes into its window and commits. The store says which bytes go where ([`Store::begin_commit`]).
//! 3. [`Effect::Copy`] asks the shell to copy and sum the bytes. Then the chunks can be read ([`Store::finish_commit`]), unless
//!    the right to commit has ended meanwhile.
//!
//! Layers of a chunk may be handed over first, in the same way, to readers that follow the chunk. Writes to lower tiers and
//! announcements follow from the store's own lists (`tiers`, `announce`).
//!
//! This module keeps the purpose of each copy until the copy has ended.
//!
//! [`Store::reserve`]: crate::store::Store::reserve
//! [`Store::begin_commit`]: crate::store::Store::begin_commit
//! [`Store::finish_commit`]: crate::store::Store::finish_commit

use std::collections::{HashMap, VecDeque};

use larder_protocol::checksum::BlockKey;
use larder_protocol::handoff::HandOver;
use larder_protocol::session::{Checked, Commit, ReportDamage, Response, Scarce};
use larder_protocol::{ChunkHash, Fingerprint};

use crate::Core;
use crate::effect::{Counted, Effect};
use crate::event::{CopyAnswer, CopyNumber, DeviceCopyNumber, RequestId};
use crate::reports::{Reporter, Reports};
use crate::store::ids::{OrderId, SessionId};
use crate::store::{BlockMove, CommitOrder, LoadBlock, Refused, VerifyOrder};

/// Copies under way.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    open: HashMap<CopyNumber, CopyPurpose>,
    /// The reports of damage in progress.
    pub(crate) reports: Reports,
    /// Chunks that were reported as damaged, to be verified one after the other.
    doubted: VecDeque<(Reporter, Fingerprint, ChunkHash)>,
    last_number: u64,
}

/// The purpose of a copy.
#[derive(Debug)]
enum CopyPurpose {
    Commit {
        request: RequestId,
        order: OrderId,
        bytes: u64,
    },
    Layers {
        request: RequestId,
        order: OrderId,
        bytes: u64,
    },
    Verify(Verification),
    /// A device wrote these blocks.
    Save(Save),
    /// The device tier wants these blocks of a load.
    Promotion {
        load: u64,
        wanted: Vec<LoadBlock>,
    },
}

/// A save by a device whose bytes are in place.
#[derive(Debug)]
pub(crate) struct Save {
    pub(crate) number: DeviceCopyNumber,
    pub(crate) order: OrderId,
    pub(crate) bytes: u64,
    pub(crate) moves: Vec<BlockMove>,
}

#[derive(Debug)]
struct Verification {
    /// The request to answer.
    request: Option<RequestId>,
    by: Reporter,
    verify: u64,
    bytes: u64,
    keys: Vec<BlockKey>,
}

impl CopyPurpose {
    /// The session that waits for the copy of its bytes.
    fn session(&self) -> Option<SessionId> {
        match self {
            Self::Commit { request, .. } | Self::Layers { request, .. } => Some(request.session),
            Self::Verify(_) | Self::Save(_) | Self::Promotion { .. } => None,
        }
    }
}

impl Copies {
    /// Forgets all copies; numbers go on.
    pub(crate) fn begin_anew(&mut self) {
        *self = Self { last_number: self.last_number, ..Self::default() };
    }
}

impl Core {
    /// Takes over chunks that a session wrote.
    pub(crate) fn commit(&mut self, request: RequestId, ask: &Commit) -> Result<(), Refused> {
        self.may_copy(request.session)?;
        let CommitOrder { order, moves, bytes } =
            self.store.begin_commit(request.session, ask.reservation, &ask.chunks, &ask.sources)?;
        self.copy(CopyPurpose::Commit { request, order, bytes }, Some(request.session), moves);
        Ok(())
    }

    /// Takes over some layers of chunks before their commit, in the same way.
    pub(crate) fn hand_over(&mut self, request: RequestId, ask: &HandOver) -> Result<(), Refused> {
        self.may_copy(request.session)?;
        let CommitOrder { order, moves, bytes } = self.store.begin_layers(request.session, ask)?;
        self.copy(CopyPurpose::Layers { request, order, bytes }, Some(request.session), moves);
        Ok(())
    }

    /// Refuses a session's copy for now if the copies of its tenant have no more room: where there are several tenants, each leaves
    /// some of the copy pool's queue to the others.
    fn may_copy(&self, session: SessionId) -> Result<(), Refused> {
        if self.copies.open.len() < MOST_COPIES_OF_A_TENANT || !self.store.has_several_tenants() {
            return Ok(());
        }
        let tenant = self.store.tenant(session)?;
        let is_of_tenant =
            |copy: &&CopyPurpose| copy.session().is_some_and(|of| self.store.tenant(of) == Ok(tenant));
        match self.copies.open.values().filter(is_of_tenant).count() < MOST_COPIES_OF_A_TENANT {
            true => Ok(()),
            false => Err(COPIES_ARE_BUSY),
        }
    }

    /// Takes an engine's report that a chunk of a registered namespace is damaged.
    pub(crate) fn report_damage(
        &mut self,
        request: RequestId,
        &ReportDamage { namespace, hash }: &ReportDamage,
    ) -> Result<(), Refused> {
        let fingerprint = self.store.registered(request.session, namespace)?;
        self.examine(Reporter::Session(request.session), fingerprint, hash, Some(request))
    }

    /// Takes a report of damaged chunks that needs no answer.
    pub(crate) fn doubt(&mut self, by: &Reporter, fingerprint: Fingerprint, hashes: Vec<ChunkHash>) {
        for hash in hashes {
            if self.copies.doubted.len() >= MOST_DOUBTED {
                self.count(Counted::Reported(by.clone(), None));
                break;
            }
            self.copies.doubted.push_back((by.clone(), fingerprint, hash));
        }
        self.examine_doubted();
    }

    fn examine_doubted(&mut self) {
        while !self.copies.reports.is_full()
            && let Some((by, fingerprint, hash)) = self.copies.doubted.pop_front()
        {
            // Refused: the next reader of the chunk will report it too.
            let _ = self.examine(by, fingerprint, hash, None);
        }
    }

    /// Begins to verify a chunk.
    fn examine(
        &mut self,
        by: Reporter,
        fingerprint: Fingerprint,
        hash: ChunkHash,
        request: Option<RequestId>,
    ) -> Result<(), Refused> {
        let now = self.millis();
        if !self.copies.reports.may_begin(&by, now) {
            self.count(Counted::Reported(by, None));
            return Err(TOO_MANY_REPORTS);
        }
        let order = self.store.begin_verify(&fingerprint, &hash);
        self.copies.reports.begin(&by, order.as_ref().map_or(0, |order| order.bytes), now);
        let Some(VerifyOrder { verify, blocks, bytes }) = order else {
            self.examined(Verification { request, by, verify: 0, bytes: 0, keys: Vec::new() }, None);
            return Ok(());
        };
        let keys = blocks.iter().map(|block| block.key).collect();
        self.copy(CopyPurpose::Verify(Verification { request, by, verify, bytes, keys }), None, blocks);
        Ok(())
    }

    /// Sums the blocks that a device saved, in place.
    pub(crate) fn sum(&mut self, save: Save) {
        let moves = save.moves.clone();
        self.copy(CopyPurpose::Save(save), None, moves);
    }

    /// Orders the checksums of a load's blocks that the device tier wants.
    pub(crate) fn sum_wanted(&mut self, load: u64, wanted: Vec<LoadBlock>) {
        let in_place = |&LoadBlock { place, bytes, range_bytes, key, .. }: &LoadBlock| BlockMove {
            source: None,
            is_in_place: true,
            place,
            bytes,
            range_bytes,
            key,
        };
        let moves = wanted.iter().map(in_place).collect();
        self.copy(CopyPurpose::Promotion { load, wanted }, None, moves);
    }

    fn copy(&mut self, purpose: CopyPurpose, session: Option<SessionId>, moves: Vec<BlockMove>) {
        self.copies.last_number += 1;
        let copy = CopyNumber(self.copies.last_number);
        self.copies.open.insert(copy, purpose);
        self.effects.push_back(Effect::Copy { copy, session, moves });
    }

    /// Takes the result of a copy that has ended, or was not begun.
    pub(crate) fn copied(&mut self, copy: CopyNumber, answer: CopyAnswer) {
        let Some(purpose) = self.copies.open.remove(&copy) else { return };
        match (purpose, answer) {
            (CopyPurpose::Save(save), answer) => self.saved(save, answer),
            (CopyPurpose::Promotion { load, wanted }, answer) => self.summed_wanted(load, wanted, answer),
            (CopyPurpose::Verify(verification), CopyAnswer::Busy) if verification.request.is_some() => {
                self.give_up_examining(verification);
            }
            (CopyPurpose::Verify(verification), answer) => {
                let sums = match answer {
                    CopyAnswer::Done(sums) => Some(sums.into_iter().map(|sums| sums.whole).collect()),
                    CopyAnswer::Busy | CopyAnswer::Impossible | CopyAnswer::Failed => None,
                };
                self.examined(verification, sums);
            }
            (
                CopyPurpose::Commit { request, order, .. } | CopyPurpose::Layers { request, order, .. },
                answer,
            ) if matches!(answer, CopyAnswer::Busy | CopyAnswer::Impossible) => {
                let refused = if answer == CopyAnswer::Busy {
                    self.store.postpone_commit(order);
                    COPIES_ARE_BUSY
                } else {
                    self.store.finish_commit(order, None);
                    Refused::Internal
                };
                self.refuse(request, Err(refused));
            }
            (CopyPurpose::Commit { request, order, bytes }, answer) => {
                let kept = self.store.finish_commit(order, answer.sums());
                if kept > 0 {
                    self.count(Counted::Committed(bytes));
                }
                self.answer(request, Response::Committed(kept));
            }
            (CopyPurpose::Layers { request, order, bytes }, answer) => {
                let sums = answer.sums();
                let pieces = sums.as_ref().map_or(0, |sums| sums.len() as u64);
                if self.store.finish_layers(order, sums) {
                    self.count(Counted::Given(pieces, bytes));
                    self.answer(request, Response::HandedOver);
                } else {
                    self.refuse(request, Err(Refused::Unknown { what: "reservation", number: 0 }));
                }
            }
        }
        self.examine_doubted();
    }

    /// Takes the sums of a chunk; `None` if it could not be summed.
    fn examined(&mut self, verification: Verification, sums: Option<Vec<u64>>) {
        let Verification { request, by, verify, bytes, keys } = verification;
        let found = self.store.finish_verify(verify, sums.as_deref());
        self.copies.reports.end(&by, bytes, found == Checked::Right);
        self.count(Counted::Reported(by.clone(), Some(found)));
        if let Some(request) = request {
            self.answer(request, Response::Checked(found));
        }
        if found == Checked::Damaged {
            self.device.drop_blocks(&keys);
            self.effects.push_back(Effect::Condemned { by, keys });
        }
    }

    /// Tells a session that its reported chunk cannot be summed now: it should ask again.
    fn give_up_examining(&mut self, Verification { request, by, verify, bytes, .. }: Verification) {
        self.store.finish_verify(verify, None);
        self.copies.reports.end(&by, bytes, false);
        self.count(Counted::Reported(by, Some(Checked::Nothing)));
        if let Some(request) = request {
            self.refuse(request, Err(TOO_MANY_REPORTS));
        }
    }

    pub(crate) fn count(&mut self, counted: Counted) {
        self.effects.push_back(Effect::Count(counted));
    }
}

/// The answer to too many reports: asking again helps when some verifications have ended.
const TOO_MANY_REPORTS: Refused = Refused::Busy { what: Scarce::Claims, retry_after_ms: 1_000 };

/// Limit of the copies of a tenant's sessions at a time, where there are several tenants: three quarters of the copy pool's queue.
const MOST_COPIES_OF_A_TENANT: usize = 48;

/// The answer while too much is being copied.
const COPIES_ARE_BUSY: Refused = Refused::Busy { what: Scarce::Memory, retry_after_ms: COPY_RETRY_MS };

/// How long a session pauses before it asks again when too much is being copied: about the time to copy a few blocks.
const COPY_RETRY_MS: u64 = 5;

/// Limit of chunks that wait to be verified after reports that need no answer.
const MOST_DOUBTED: usize = 1_024;
