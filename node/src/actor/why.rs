//! The actor's answers to the question why a prompt was a miss.

use actix::{Context, Handler};
use larder_core::lookups::{ChunkOutcome, LookupRecord, OutcomeRun};
use larder_core::store::OtherNamespace;
use larder_protocol::{ChunkHash, Fingerprint};

use super::{AskChain, AskLookups, ChainSeen, GpuActor, LookupsSeen};

impl GpuActor {
    /// The namespaces that resemble one in which a chunk is nowhere.
    fn others_like(
        &self,
        fingerprint: &Fingerprint,
        hashes: &[ChunkHash],
        outcomes: &[OutcomeRun],
    ) -> Vec<OtherNamespace> {
        let starts = std::iter::once(0).chain(outcomes.iter().map(|run| run.to));
        let mut missing = starts.zip(outcomes).filter(|(_, run)| run.outcome == ChunkOutcome::Absent);
        let missing = missing.next().and_then(|(from, _)| hashes.get(from as usize));
        missing.map(|hash| self.core.store().others_like(fingerprint, hash)).unwrap_or_default()
    }
}

impl Handler<AskLookups> for GpuActor {
    type Result = LookupsSeen;

    fn handle(&mut self, AskLookups(filter): AskLookups, _: &mut Context<Self>) -> LookupsSeen {
        let with_others = |record: LookupRecord| {
            let others = self.others_like(&record.fingerprint, &record.hashes, &record.outcomes);
            (record, others)
        };
        let records = self.core.last_lookups(&filter).into_iter().map(with_others).collect();
        LookupsSeen { records, evictions: self.core.store().remembered_evictions() }
    }
}

impl Handler<AskChain> for GpuActor {
    type Result = ChainSeen;

    fn handle(&mut self, ask: AskChain, _: &mut Context<Self>) -> ChainSeen {
        let store = self.core.store();
        let outcomes = store.has_of(&ask.fingerprint, &ask.hashes);
        let others = self.others_like(&ask.fingerprint, &ask.hashes, outcomes.as_deref().unwrap_or_default());
        ChainSeen {
            outcomes,
            others,
            stays: store.stays(&ask.fingerprint, &ask.hashes),
            evicted_after_ms: store.evicted_after_ms(),
            evictions: store.remembered_evictions(),
        }
    }
}
