//! A tier that the previous release wrote is read as it was written.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use super::*;
use crate::disk::format::RecordHeader;
use crate::object::STORAGE;

/// A chunk that the previous release wrote, as its object has it.
pub(crate) struct Written {
    /// The object's path, and its bytes.
    pub(crate) object: (&'static str, Vec<u8>),
    header: RecordHeader,
}

impl Written {
    /// All chunks that the previous release wrote.
    pub(crate) fn all() -> Vec<Self> {
        let objects = TEXT.lines().filter_map(|line| line.strip_prefix("object "));
        let written = objects.map(|object| {
            let mut words = object.split(' ');
            let (path, length) = (words.next().unwrap(), words.next().unwrap().parse().unwrap());
            let mut bytes = vec![0; length];
            for (page, hex) in bytes.chunks_mut(PAGE_BYTES as usize).zip(words) {
                let content = unhex(hex);
                page[..content.len()].copy_from_slice(&content);
            }
            let header = RecordHeader::decode(&bytes[..PAGE_BYTES as usize], STORAGE).unwrap();
            Self { object: (path, bytes), header }
        });
        written.collect()
    }

    /// Makes the order to read the chunk into memory that nothing else uses.
    pub(crate) fn read_order(&self, slots: &Slots) -> ReadOrder {
        let memory = slots.arena.extent(1);
        let [block] = &self.header.blocks[..] else { panic!("each has one block") };
        memory.copy_in(0, &vec![0xee; block.bytes as usize]).unwrap();
        let place = BlockPlace {
            slice: block.slice,
            pool: block.pool,
            memory: Arc::clone(memory),
            offset: 0,
            bytes: block.bytes,
            range_bytes: block.range_bytes,
        };
        ReadOrder::new(self.header.fingerprint, self.header.chunk, vec![place]).unwrap()
    }

    /// Checks that an answer is `Here`, and that bytes and checksums are those that were written.
    pub(crate) fn assert_right(&self, slots: &Slots, answer: &ReadAnswer) {
        let ReadAnswer::Here { checksums, .. } = answer else { panic!("{:?}: {answer:?}", self.header) };
        let block = &self.header.blocks[0];
        let mut found = vec![0; block.bytes as usize];
        slots.arena.extent(1).copy_out(0, &mut found).unwrap();
        let payload = &self.object.1[PAGE_BYTES as usize..][..found.len()];
        assert!(found == payload, "{:?} came back with other bytes", self.header.chunk);
        assert_eq!(checksums[..], *std::slice::from_ref(&block.checksums));
    }
}

/// Makes the folder of the tier that the previous release wrote.
fn make_tier(folder: &Path) {
    let mut disk = None;
    for line in TEXT.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["disk", length] => {
                let file = File::create(folder.join("larder.disk")).unwrap();
                file.set_len(length.parse().unwrap()).unwrap();
                disk = Some(file);
            }
            ["at", offset, hex] => {
                disk.as_ref().unwrap().write_all_at(&unhex(hex), offset.parse().unwrap()).unwrap();
            }
            ["file", path, hex] => {
                let path = folder.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, unhex(hex)).unwrap();
            }
            ["object", ..] => {}
            _ => panic!("{line}"),
        }
    }
}

fn unhex(text: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}

#[test]
fn a_disk_of_the_release_before_holds_all_that_it_held() {
    let folder = tempfile::tempdir().unwrap();
    make_tier(folder.path());
    let options = DiskOptions { capacity_bytes: 16 << 20, segment_bytes: 1 << 20, ..options(folder.path()) };
    let (slots, written) = (Slots::new(), Written::all());
    assert_eq!(written.len(), 11);
    for _ in ["after its crash", "after the restart"] {
        let tier = DiskTier::open(&options, metrics(), gone().0).unwrap();
        for chunk in &written {
            let answer = tier.read(chunk.read_order(&slots)).unwrap().blocking_recv().unwrap();
            chunk.assert_right(&slots, &answer);
        }
    }
}

const TEXT: &str = include_str!("../testdata/before.txt");
