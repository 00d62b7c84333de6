//! Finds the record of each chunk: about 62 bytes a record.

use std::cmp::Reverse;
use std::hash::BuildHasher;

use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use larder_core::store::ids::ChunkKey;
use larder_protocol::{ChunkHash, Fingerprint};

use super::RecordPlace;

/// The records of a tier, by key. After a record is removed, its id may go to another record.
#[derive(Debug, Default)]
pub(super) struct Index {
    ids: HashTable<u32>,
    records: Vec<Record>,
    free: Vec<u32>,
    namespaces: Namespaces,
    hasher: DefaultHashBuilder,
}

#[derive(Debug, Clone, Copy)]
struct Record {
    hash: ChunkHash,
    place: RecordPlace,
    /// The namespace's number; the highest bit says that the record was read since it was written.
    namespace: u32,
}

/// Fingerprints by number: an index entry has no room for a whole fingerprint.
#[derive(Debug, Default)]
struct Namespaces {
    numbers: HashMap<Fingerprint, u32>,
    /// The fingerprint of each number, and how many records have it.
    fingerprints: Vec<(Fingerprint, u32)>,
    unused: Vec<u32>,
}

impl Index {
    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    /// The namespaces that have records, those with the most first.
    pub(super) fn namespaces(&self) -> Vec<Fingerprint> {
        let mut held: Vec<_> =
            self.namespaces.fingerprints.iter().filter(|(_, records)| *records > 0).collect();
        held.sort_by_key(|(fingerprint, records)| (Reverse(*records), *fingerprint));
        held.into_iter().map(|(fingerprint, _)| *fingerprint).collect()
    }

    /// Bytes of memory that the index takes.
    pub(super) fn memory_bytes(&self) -> usize {
        self.ids.allocation_size()
            + self.records.capacity() * size_of::<Record>()
            + self.free.capacity() * size_of::<u32>()
    }

    pub(super) fn find(&self, key: &ChunkKey) -> Option<u32> {
        let namespace = *self.namespaces.numbers.get(&key.fingerprint)?;
        let hash = self.hash(namespace, &key.hash);
        self.ids.find(hash, |&id| self.records[id as usize].is(namespace, &key.hash)).copied()
    }

    /// Notes that a chunk's record is now at `place`, where nobody has read it yet.
    pub(super) fn insert(&mut self, key: &ChunkKey, place: RecordPlace) -> u32 {
        if let Some(id) = self.find(key) {
            let record = &mut self.records[id as usize];
            record.place = place;
            record.namespace &= !HOT;
            return id;
        }
        let namespace = self.namespaces.hold(key.fingerprint);
        let record = Record { hash: key.hash, place, namespace };
        let id = self.free.pop().unwrap_or_else(|| {
            if self.records.len() == self.records.capacity() {
                // Grow by an eighth, not by double: at a million records this saves 48 bytes each.
                self.records.reserve_exact((self.records.len() / 8).max(1_024));
            }
            self.records.push(record);
            self.records.len() as u32 - 1
        });
        self.records[id as usize] = record;
        let hash = self.hash(namespace, &key.hash);
        let (hasher, records) = (&self.hasher, &self.records);
        let rehash = |&id: &u32| {
            let record = &records[id as usize];
            hasher.hash_one((record.namespace & !HOT, record.hash))
        };
        match self.ids.entry(hash, |_| false, rehash) {
            Entry::Vacant(entry) => drop(entry.insert(id)),
            Entry::Occupied(_) => unreachable!("nothing is equal"),
        }
        id
    }

    /// Forgets a record.
    pub(super) fn remove(&mut self, id: u32) {
        let record = self.records[id as usize];
        let namespace = record.namespace & !HOT;
        let hash = self.hash(namespace, &record.hash);
        if let Ok(entry) = self.ids.find_entry(hash, |&other| other == id) {
            entry.remove();
            self.records[id as usize].place.pages = 0;
            self.free.push(id);
            self.namespaces.release(namespace);
        }
    }

    /// The place of a record; `None` for an unknown id.
    pub(super) fn place(&self, id: u32) -> Option<RecordPlace> {
        self.records.get(id as usize).map(|record| record.place).filter(|place| place.pages > 0)
    }

    /// The key of a record that is there.
    pub(super) fn key(&self, id: u32) -> ChunkKey {
        let record = &self.records[id as usize];
        let fingerprint = self.namespaces.fingerprints[(record.namespace & !HOT) as usize].0;
        ChunkKey { fingerprint, hash: record.hash }
    }

    pub(super) fn touch(&mut self, id: u32) {
        self.records[id as usize].namespace |= HOT;
    }

    pub(super) fn is_hot(&self, id: u32) -> bool {
        self.records[id as usize].namespace & HOT != 0
    }

    /// The first record whose id is `from` or more.
    pub(super) fn next(&self, from: u32) -> Option<u32> {
        (from..self.records.len() as u32).find(|&id| self.place(id).is_some())
    }

    fn hash(&self, namespace: u32, hash: &ChunkHash) -> u64 {
        self.hasher.hash_one((namespace, *hash))
    }
}

impl Record {
    fn is(&self, namespace: u32, hash: &ChunkHash) -> bool {
        self.namespace & !HOT == namespace && self.hash == *hash
    }
}

impl Namespaces {
    /// Counts one more record of a namespace, and returns the namespace's number.
    fn hold(&mut self, fingerprint: Fingerprint) -> u32 {
        let number = *self.numbers.entry(fingerprint).or_insert_with(|| {
            self.unused.pop().unwrap_or_else(|| {
                self.fingerprints.push((fingerprint, 0));
                self.fingerprints.len() as u32 - 1
            })
        });
        let (of, records) = &mut self.fingerprints[number as usize];
        *of = fingerprint;
        *records += 1;
        number
    }

    /// Counts one record less of a namespace.
    fn release(&mut self, number: u32) {
        let (fingerprint, records) = &mut self.fingerprints[number as usize];
        *records -= 1;
        if *records == 0 {
            self.numbers.remove(fingerprint);
            self.unused.push(number);
        }
    }
}

const HOT: u32 = 1 << 31;
