//! The times and the memory of a store with many chunks, beside a hash map with as many entries.

use super::Measurement;
use super::store::StoreBench;
use super::yardsticks::HashProbes;
use crate::heap;

/// The rows of a store with `millions` million chunks: a lookup of 100 chunks, a hit, an eviction, bytes of heap a chunk.
///
/// # Errors
/// The store refuses.
pub fn scale(millions: u64, rounds: usize) -> anyhow::Result<Vec<Measurement>> {
    let chunks = millions * 1_000_000;
    let (full, store_bytes) = used_by(|| StoreBench::filled(chunks, chunks, 0));
    let mut full = full?;
    let mut rows = vec![full.lookup(rounds)?, full.hit(rounds)?];
    let mut roomy = StoreBench::filled(chunks, 2 * chunks, 0)?;
    rows.push(full.evict(&mut roomy, rounds)?);
    drop(roomy);
    let (_map, map_bytes) = used_by(|| HashProbes::new(chunks, 1, 0));
    if let (Some(store), Some(map)) = (store_bytes, map_bytes) {
        let each = [store, map].map(|bytes| bytes as f64 / chunks as f64);
        rows.push(Measurement::bytes("store_chunk", "hash-map entry", each));
    }
    for row in &mut rows {
        row.name = format!("{}_{millions}M", row.name);
    }
    Ok(rows)
}

/// Makes a value; returns it with the bytes of heap that it takes.
fn used_by<T>(make: impl FnOnce() -> T) -> (T, Option<usize>) {
    let before = heap::used_bytes();
    let made = make();
    let bytes = heap::used_bytes().zip(before).map(|(after, before)| after.saturating_sub(before));
    (made, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_env = "gnu")]
    fn the_heap_tells_what_is_used() {
        let (kept, bytes) = used_by(|| vec![1_u8; 32 << 20]);
        assert!(bytes.is_some_and(|bytes| bytes >= kept.len()));
        drop(kept);
    }
}
