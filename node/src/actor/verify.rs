//! Chunks that an engine, a peer or a sibling says are damaged: they are summed, and dropped where that is so.

use actix::fut::LocalBoxActorFuture;
use actix::prelude::*;
use larder_core::reports::Reporter;
use larder_core::store::ids::SessionId;
use larder_core::store::{Refused, VerifyOrder};
use larder_protocol::checksum::BlockKey;
use larder_protocol::session::{Checked, ReportDamage, Response, Scarce};
use larder_protocol::{ChunkHash, Fingerprint};

use super::answer::Asked;
use super::{Answer, GpuActor, Reply};
use crate::copy::{BlockChecksums, CopyOrder};
use crate::exchange::VerifyChunks;
use crate::metrics::Reported;

/// What comes of a report.
enum Examined {
    Now(Checked),
    /// It must be carried out: the chunk is claimed until it is.
    Later(LocalBoxActorFuture<GpuActor, Checked>),
    /// Nothing was done: this reporter, or all together, have too much verified.
    TooMuch,
}

impl GpuActor {
    /// An engine read a chunk of a namespace that it registered, and found it damaged.
    pub(super) fn report_damage(
        &mut self,
        session: SessionId,
        ReportDamage { namespace, hash }: ReportDamage,
        asked: Asked,
        ctx: &mut Context<Self>,
    ) -> Result<Reply, Refused> {
        let fingerprint = self.core.store.registered(session, namespace)?;
        match self.examine(Reporter::Session(session), fingerprint, hash) {
            Examined::Now(found) => Ok(Reply::Now(Answer::from(Response::Checked(found)))),
            Examined::Later(found) => {
                let answer = found.map(move |found, actor: &mut Self, ctx: &mut Context<Self>| {
                    actor.reply(asked, Answer::from(Response::Checked(found)));
                    actor.settle(ctx);
                });
                self.spawn(ctx, answer);
                Ok(Reply::Later)
            }
            Examined::TooMuch => Err(Refused::Busy { what: Scarce::Claims, retry_after_ms: REPORT_RETRY_MS }),
        }
    }

    /// Verifies chunks for somebody who wants no answer.
    pub(super) fn verify_chunks(&mut self, verify: VerifyChunks, ctx: &mut Context<Self>) {
        let VerifyChunks { by, fingerprint, hashes } = verify;
        for hash in hashes {
            match self.examine(by.clone(), fingerprint, hash) {
                Examined::Now(_) => {}
                Examined::Later(found) => self.spawn(ctx, found.map(|_, actor, ctx| actor.settle(ctx))),
                Examined::TooMuch => break,
            }
        }
        self.settle(ctx);
    }

    /// Tells a sibling that chunks of its came with other bytes than it has checksums for.
    pub(super) fn tell_sibling_damaged(&self, device: u16, fingerprint: Fingerprint, hashes: Vec<ChunkHash>) {
        let Some(siblings) = &self.siblings else { return };
        let by = Reporter::Sibling(siblings.device());
        if let Some(sibling) = siblings.actor(device)
            && sibling.verify.try_send(VerifyChunks { by, fingerprint, hashes }).is_err()
        {
            tracing::debug!(device, "a sibling is busy: the next who reads its chunk tells it");
        }
    }

    /// Begins to verify a chunk. A small one is summed on the spot, since handing it over would take longer.
    fn examine(&mut self, by: Reporter, fingerprint: Fingerprint, hash: ChunkHash) -> Examined {
        let now = self.clock.now();
        if !self.reports.may_begin(&by, now) {
            self.metrics.reported(&by, Reported::TooMuch);
            return Examined::TooMuch;
        }
        let order = self.core.store.begin_verify(&fingerprint, &hash);
        self.reports.begin(&by, order.as_ref().map_or(0, |order| order.bytes), now);
        let Some(VerifyOrder { verify, blocks, bytes }) = order else {
            self.reports.end(&by, 0, false);
            self.metrics.reported(&by, Reported::Checked(Checked::Nothing));
            return Examined::Now(Checked::Nothing);
        };
        let examined =
            Examination { by, hash, verify, bytes, keys: blocks.iter().map(|block| block.key).collect() };
        let sums = CopyOrder::new(None, blocks.iter().map(|block| self.copy_move(block)).collect());
        let sums = match sums {
            Ok(sums) if sums.is_small() => {
                let sums = sums.perform();
                return Examined::Now(self.examined(&examined, Some(sums)));
            }
            Ok(sums) => sums,
            Err(error) => {
                tracing::error!(%error, "the store made an order that does not fit its memory");
                return Examined::Now(self.examined(&examined, None));
            }
        };
        match self.lane.submit(sums) {
            Ok(summed) => {
                let found = summed.into_actor(self);
                Examined::Later(Box::pin(
                    found.map(move |sums, actor, _| actor.examined(&examined, sums.ok())),
                ))
            }
            Err(_) => {
                self.examined(&examined, None);
                Examined::TooMuch
            }
        }
    }

    /// A chunk was summed, or could not be: `None`.
    fn examined(&mut self, examined: &Examination, sums: Option<Vec<BlockChecksums>>) -> Checked {
        let Examination { by, hash, verify, bytes, keys } = examined;
        let sums = sums.map(|sums| sums.into_iter().map(|sums| sums.whole).collect::<Vec<u64>>());
        let found = self.core.store.finish_verify(*verify, sums.as_deref());
        self.reports.end(by, *bytes, found == Checked::Damaged);
        self.metrics.reported(by, Reported::Checked(found));
        if found == Checked::Damaged {
            tracing::error!(
                chunk = %hash,
                by = by.name(),
                "a chunk in memory has other bytes than were committed under its name: it is dropped"
            );
            self.drop_from_device(keys);
        }
        found
    }
}

/// A chunk that is being verified.
struct Examination {
    by: Reporter,
    hash: ChunkHash,
    verify: u64,
    bytes: u64,
    keys: Vec<BlockKey>,
}

impl Handler<VerifyChunks> for GpuActor {
    type Result = ();

    fn handle(&mut self, verify: VerifyChunks, ctx: &mut Self::Context) {
        self.guard(ctx, |actor, ctx| actor.verify_chunks(verify, ctx));
    }
}

/// How long a session waits that reports too much.
const REPORT_RETRY_MS: u64 = 1_000;
