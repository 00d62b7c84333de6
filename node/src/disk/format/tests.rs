//! Tests of the format.

use super::*;

const STORAGE: StorageId = StorageId([0xa5; 16]);

fn header() -> RecordHeader {
    let fingerprint = Fingerprint([1; 32]);
    let hash = |byte| ChunkHash([byte; 32]);
    let chunk = ChunkRef { hash: hash(2), parent: hash(3), index: 4, anchor: hash(5) };
    let block = |slice, pool, bytes, range_bytes, ranges: &[u64]| {
        let key = BlockKey { fingerprint, hash: chunk.hash, slice, pool };
        let checksums = Checksums::of(&key, ranges.iter().copied());
        BlockEntry { slice, pool, bytes, range_bytes, checksums }
    };
    let blocks = vec![block(0, 0, 10_000, 4_000, &[11, 12, 13]), block(1, 2, 77, 1 << 20, &[14])];
    let segment = SegmentHeader { segment: 6, sequence: 7 };
    RecordHeader { segment, page: 8, sequence: 9, fingerprint, chunk, blocks }
}

fn footer() -> Footer {
    let header = header();
    let second = FooterEntry { page: 20, sequence: 10, ..header.footer_entry() };
    Footer { segment: header.segment, end_page: 24, entries: vec![header.footer_entry(), second] }
}

fn superblock() -> Superblock {
    Superblock { storage: STORAGE, segment_bytes: 256 << 20, segments: 80 }
}

/// One of each structure that stands on disk.
fn everything() -> Vec<u8> {
    [
        superblock().encode(),
        header().segment.encode(STORAGE),
        header().encode(STORAGE),
        footer().encode(STORAGE),
    ]
    .concat()
}

/// Hexadecimal lines of 32 bytes, each with its offset. Lines of zeros are left out.
fn hex(bytes: &[u8]) -> String {
    let lines = bytes.chunks(32).enumerate().filter(|(_, line)| line.iter().any(|&byte| byte != 0));
    let digits = |line: &[u8]| line.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    lines.map(|(number, line)| format!("{:05x} {}\n", number * 32, digits(line))).collect()
}

#[test]
fn the_format_is_what_it_always_was() {
    assert_eq!(
        hex(&[everything(), wiped_record(STORAGE)].concat()),
        include_str!("../testdata/golden.hex"),
        "raise VERSION, keep the old file"
    );
}

#[test]
fn what_is_written_is_read_back() {
    assert_eq!(Superblock::decode(&superblock().encode()), Ok(superblock()));
    let segment = header().segment;
    assert_eq!(SegmentHeader::decode(&segment.encode(STORAGE), STORAGE, 6), Ok(segment));
    let encoded = header().encode(STORAGE);
    assert_eq!(RecordHeader::peek_pages(&encoded), Ok(1));
    assert_eq!(RecordHeader::decode(&encoded, STORAGE), Ok(header()));
    let encoded = footer().encode(STORAGE);
    let tail = FooterTail::decode(&encoded, STORAGE, segment).unwrap();
    assert_eq!((tail.pages(), Footer::decode(&encoded, &tail)), (1, Ok(footer())));
}

#[test]
fn what_belongs_to_another_storage_place_or_use_is_not_taken() {
    let (other, segment) = (StorageId([1; 16]), header().segment);
    let foreign = Err(FormatError::Foreign);
    assert_eq!(SegmentHeader::decode(&segment.encode(STORAGE), other, 6), foreign);
    assert_eq!(SegmentHeader::decode(&segment.encode(STORAGE), STORAGE, 5), foreign);
    assert_eq!(RecordHeader::decode(&header().encode(STORAGE), other), Err(FormatError::Foreign));
    let earlier = SegmentHeader { sequence: 6, ..segment };
    let footer = footer().encode(STORAGE);
    assert_eq!(FooterTail::decode(&footer, STORAGE, earlier), Err(FormatError::Foreign));
}

#[test]
fn every_flipped_bit_of_what_has_meaning_is_found() {
    let all = everything();
    let right = decode_all(&all);
    assert!(right.iter().all(|&right| right));
    for (number, byte) in all.iter().enumerate() {
        let (part, at) = (number / 4096, number % 4096);
        let has_meaning = match part {
            0 => at < 56,
            1 => at < 48,
            2 => true,
            _ => !(304..4096 - 64).contains(&at),
        };
        if has_meaning {
            let mut flipped = all.clone();
            flipped[number] = byte ^ (1 << (number % 8));
            assert!(!decode_all(&flipped)[part], "byte {at} of part {part}");
        }
    }
}

#[test]
fn nothing_that_is_read_makes_it_panic() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..3_000 {
        let mut bytes = everything();
        for _ in 0..random.usize(1..20) {
            let at = random.usize(..bytes.len());
            bytes[at] = random.u8(..);
        }
        bytes.truncate(random.usize(..=bytes.len()));
        bytes.resize(4 * 4096, 0);
        // With right checksums, so that the fields behind them are decoded too.
        bytes[8192 + 200..][..8].fill(0);
        let checksum = xxh3_64(&bytes[8192..][..4096]).to_le_bytes();
        bytes[8192 + 200..][..8].copy_from_slice(&checksum);
        decode_all(&bytes);
        decode_all(&bytes[random.usize(..bytes.len())..]);
    }
}

/// Whether each part can be decoded.
fn decode_all(bytes: &[u8]) -> [bool; 4] {
    let page = |number: usize| bytes.get(number * 4096..(number + 1) * 4096).unwrap_or_default();
    let tail = FooterTail::decode(page(3), STORAGE, header().segment);
    let footer = tail.is_ok_and(|tail| Footer::decode(page(3), &tail).is_ok());
    let record = RecordHeader::peek_pages(page(2)).is_ok() && RecordHeader::decode(page(2), STORAGE).is_ok();
    let segment = SegmentHeader::decode(page(1), STORAGE, 6).is_ok();
    [Superblock::decode(page(0)).is_ok(), segment, record, footer]
}

#[test]
fn a_header_of_many_blocks_takes_as_many_pages_as_it_says() {
    let mut large = header();
    let block = large.blocks[0].clone();
    large.blocks = (0..500).map(|slice| BlockEntry { slice, ..block.clone() }).collect();
    for block in &mut large.blocks {
        let key =
            BlockKey { fingerprint: large.fingerprint, hash: large.chunk.hash, slice: block.slice, pool: 0 };
        block.checksums.whole = block_checksum(&key, &block.checksums.ranges);
    }
    let encoded = large.encode(STORAGE);
    let pages = RecordHeader::peek_pages(&encoded[..4096]).unwrap();
    assert_eq!((pages, pages as usize * 4096), (RecordHeader::pages_for(&large.blocks), encoded.len()));
    assert_eq!(RecordHeader::decode(&encoded, STORAGE), Ok(large));
}

#[test]
fn a_record_that_ends_behind_its_segment_or_behind_all_numbers_is_not_within_it() {
    let ends = |page, pages| FooterEntry { page, pages, ..header().footer_entry() }.is_within(64);
    assert!(ends(60, 4));
    assert!(!ends(60, 5));
    assert!(!ends(60, 0));
    assert!(!ends(u32::MAX, 2));
}
