//! Decides which chunks are worth a write to disk: most chunks are used once, and writes wear out drives.

use std::collections::HashMap;

use larder_protocol::ChunkHash;

use super::ids::{ChunkKey, TenantId};

/// Counts the uses of chunks, also of chunks that have left memory.
///
/// Each tenant has two generations, of its part of `most` chunks each: when the younger is full, the older is forgotten. The
/// parts are equal. A remembered chunk takes about 24 bytes.
#[derive(Debug)]
pub(super) struct Admission {
    most: usize,
    after_uses: u32,
    tenants: HashMap<TenantId, Generations>,
}

#[derive(Debug, Default)]
struct Generations {
    younger: HashMap<u64, u32>,
    older: HashMap<u64, u32>,
}

impl Admission {
    /// Remembers the last `most` used chunks at least, and twice as many at most, each tenant its part of them. A chunk that was
    /// used `after_uses` times is worth writing.
    pub(super) fn new(most: usize, after_uses: u32) -> Self {
        Self { most, after_uses, tenants: HashMap::new() }
    }

    /// Whether a chunk was used often enough.
    pub(super) fn is_worth_writing(&self, tenant: TenantId, chunk: &ChunkKey) -> bool {
        self.tenants.get(&tenant).map_or(0, |of| of.uses(short(chunk))) >= self.after_uses
    }

    /// Notes a use (a commit or a hit) of a tenant's chunk; returns whether the chunk is worth writing now.
    pub(super) fn used(&mut self, tenant: TenantId, chunk: &ChunkKey) -> bool {
        let (tenants, short) = (self.tenants.len(), short(chunk));
        let of = self.tenants.entry(tenant).or_default();
        let uses = of.uses(short) + 1;
        if of.younger.len() >= self.most / tenants.max(1) && !of.younger.contains_key(&short) {
            of.older = std::mem::take(&mut of.younger);
        }
        of.younger.insert(short, uses);
        uses >= self.after_uses
    }

    /// Forgets the uses by a tenant that left.
    pub(super) fn forget(&mut self, tenant: TenantId) {
        self.tenants.remove(&tenant);
    }
}

impl Generations {
    fn uses(&self, short: u64) -> u32 {
        self.younger.get(&short).or_else(|| self.older.get(&short)).copied().unwrap_or(0)
    }
}

/// Equal hashes of two namespaces name two chunks.
fn short(ChunkKey { fingerprint, hash }: &ChunkKey) -> u64 {
    hash.short() ^ ChunkHash(fingerprint.0).short()
}

#[cfg(test)]
mod tests {
    use larder_protocol::Fingerprint;

    use super::*;

    const TENANT: TenantId = TenantId(0);

    fn chunk(number: u64) -> ChunkKey {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        ChunkKey { fingerprint: Fingerprint([7; 32]), hash: ChunkHash(bytes) }
    }

    #[test]
    fn a_chunk_is_worth_writing_from_the_use_on_that_was_asked_for() {
        for after_uses in 1..5 {
            let mut admission = Admission::new(10, after_uses);
            let worth: Vec<bool> = (0..5).map(|_| admission.used(TENANT, &chunk(1))).collect();
            assert_eq!(worth, (1..=5).map(|uses| uses >= after_uses).collect::<Vec<_>>());
            let is_worth = |number| admission.is_worth_writing(TENANT, &chunk(number));
            assert!(is_worth(1) && !is_worth(2));
        }
    }

    #[test]
    fn uses_are_remembered_for_as_many_chunks_as_promised_and_no_more_than_twice_as_many() {
        let mut admission = Admission::new(100, 2);
        for number in 0..1_000 {
            assert!(!admission.used(TENANT, &chunk(number)));
            let of = &admission.tenants[&TENANT];
            assert!(of.younger.len() + of.older.len() <= 200);
        }
        assert!((900..1_000).all(|number| admission.used(TENANT, &chunk(number))));
        assert!(!admission.used(TENANT, &chunk(3)));
    }

    #[test]
    fn uses_of_many_chunks_of_one_tenant_make_those_of_another_neither_forgotten_nor_more() {
        let mut admission = Admission::new(100, 2);
        let other = ChunkKey { fingerprint: Fingerprint([8; 32]), ..chunk(1) };
        assert!(!admission.used(TenantId(1), &other));
        for number in 0..1_000 {
            assert!(!admission.used(TENANT, &chunk(number)));
        }
        assert!(!admission.used(TENANT, &other) && admission.used(TenantId(1), &other));
        let another = ChunkKey { fingerprint: Fingerprint([9; 32]), ..other };
        assert!(!admission.used(TenantId(1), &another), "of two namespaces");
        admission.forget(TenantId(1));
        assert!(!admission.is_worth_writing(TenantId(1), &other));
    }
}
