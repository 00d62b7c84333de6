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
    /// The namespace of each number.
    held: Vec<NamespaceRecords>,
    unused: Vec<u32>,
}

#[derive(Debug)]
struct NamespaceRecords {
    fingerprint: Fingerprint,
    records: u32,
    /// Pages of the records.
    pages: u64,
}

impl Index {
    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    /// The namespaces that have records, those with the most first.
    pub(super) fn namespaces(&self) -> Vec<Fingerprint> {
        let mut held: Vec<_> = self.namespaces.held.iter().filter(|held| held.records > 0).collect();
        held.sort_by_key(|held| (Reverse(held.records), held.fingerprint));
        held.into_iter().map(|held| held.fingerprint).collect()
    }

    /// For each namespace, by number, its owner and the pages of its records.
    pub(super) fn pages<Owner>(
        &self,
        owner: impl Fn(&Fingerprint) -> Option<Owner>,
    ) -> Vec<(Option<Owner>, u64)> {
        let held = self.namespaces.held.iter();
        held.map(|held| (owner(&held.fingerprint).filter(|_| held.records > 0), held.pages)).collect()
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
            let before = std::mem::replace(&mut record.place, place);
            record.namespace &= !HOT;
            let held = &mut self.namespaces.held[record.namespace as usize];
            held.pages = held.pages + u64::from(place.pages) - u64::from(before.pages);
            return id;
        }
        let namespace = self.namespaces.hold(key.fingerprint, place.pages);
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
            self.namespaces.release(namespace, record.place.pages);
        }
    }

    /// The place of a record; `None` for an unknown id.
    pub(super) fn place(&self, id: u32) -> Option<RecordPlace> {
        self.records.get(id as usize).map(|record| record.place).filter(|place| place.pages > 0)
    }

    /// The key of a record that is there.
    pub(super) fn key(&self, id: u32) -> ChunkKey {
        let fingerprint = self.namespaces.held[self.namespace(id)].fingerprint;
        ChunkKey { fingerprint, hash: self.records[id as usize].hash }
    }

    /// The number of a record's namespace.
    pub(super) fn namespace(&self, id: u32) -> usize {
        (self.records[id as usize].namespace & !HOT) as usize
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
    fn hold(&mut self, fingerprint: Fingerprint, pages: u32) -> u32 {
        let number = *self.numbers.entry(fingerprint).or_insert_with(|| {
            self.unused.pop().unwrap_or_else(|| {
                self.held.push(NamespaceRecords { fingerprint, records: 0, pages: 0 });
                self.held.len() as u32 - 1
            })
        });
        let held = &mut self.held[number as usize];
        held.fingerprint = fingerprint;
        held.records += 1;
        held.pages += u64::from(pages);
        number
    }

    /// Counts one record less of a namespace.
    fn release(&mut self, number: u32, pages: u32) {
        let held = &mut self.held[number as usize];
        held.records -= 1;
        held.pages -= u64::from(pages);
        if held.records == 0 {
            self.numbers.remove(&held.fingerprint);
            self.unused.push(number);
        }
    }
}

const HOT: u32 = 1 << 31;
