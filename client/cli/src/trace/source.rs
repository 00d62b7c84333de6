//! Opens traces: files and standard input, plain or packed by gzip or zstd. The first bytes tell the packer, not the file's name.
//!
//! A packed trace is unpacked as it is read, so it takes only the memory of its packer's window.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::BlockDecodingStrategy;
use ruzstd::decoding::FrameDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};

/// Opens a file, or standard input for `-`.
///
/// # Errors
/// The system's error.
pub fn open(path: &Path) -> io::Result<Box<dyn BufRead>> {
    if path.as_os_str() == "-" { unpacked(io::stdin()) } else { unpacked(File::open(path)?) }
}

/// Reads the unpacked content of `source`, or `source` itself if it is plain, without the mark by which some editors begin UTF-8.
///
/// # Errors
/// `source` cannot be read.
pub fn unpacked(mut source: impl Read + 'static) -> io::Result<Box<dyn BufRead>> {
    let mut first = Vec::new();
    source.by_ref().take(ZSTD_MAGIC.len() as u64).read_to_end(&mut first)?;
    if first.starts_with(BYTE_ORDER_MARK) {
        first.drain(..BYTE_ORDER_MARK.len());
    }
    let (is_gzip, is_zstd) = (first.starts_with(&GZIP_MAGIC), is_zstd(&first));
    let whole = BufReader::new(Cursor::new(first).chain(source));
    Ok(match (is_gzip, is_zstd) {
        (true, _) => Box::new(BufReader::new(Packed { packer: "gzip", source: MultiGzDecoder::new(whole) })),
        (_, true) => Box::new(BufReader::new(Packed { packer: "zstd", source: Frames::new(whole) })),
        _ => Box::new(whole),
    })
}

/// A packed source. Its errors name the packer.
struct Packed<R> {
    packer: &'static str,
    source: R,
}

/// The frames of a zstd file, one after the other; frames without data are skipped.
struct Frames<R> {
    source: R,
    decoder: FrameDecoder,
    /// Whether a frame is being read.
    is_amid: bool,
}

impl<R: Read> Read for Packed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let told = |error: io::Error| {
            io::Error::new(
                error.kind(),
                format!("packed by {}, and damaged or cut off: {error}", self.packer),
            )
        };
        self.source.read(buffer).map_err(told)
    }
}

impl<R: BufRead> Frames<R> {
    fn new(source: R) -> Self {
        Self { source, decoder: FrameDecoder::new(), is_amid: false }
    }

    /// Begins the next frame; returns whether there is one.
    fn begin(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.init(&mut self.source) {
                Ok(()) => {
                    self.is_amid = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    io::copy(&mut self.source.by_ref().take(length.into()), &mut io::sink())?;
                }
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(false)
    }

    /// Ends a frame after its last byte.
    fn end(&mut self) -> io::Result<()> {
        self.is_amid = false;
        let (promised, found) =
            (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum());
        match promised.is_none_or(|promised| Some(promised) == found) {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::InvalidData, "a frame has another checksum")),
        }
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.is_amid && !self.begin()? {
                return Ok(0);
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder.decode_blocks(&mut self.source, one).map_err(io::Error::other)?;
            }
            let read = self.decoder.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            self.end()?;
        }
    }
}

/// Whether these are the first bytes of a frame of zstd, even of a frame without data.
fn is_zstd(first: &[u8]) -> bool {
    let [low, rest @ ..] = first else { return false };
    first == ZSTD_MAGIC || (low >> 4 == 5 && rest == ZSTD_SKIPPED)
}

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// The last bytes of the magic number of a frame without data; the first is 0x50 to 0x5f.
const ZSTD_SKIPPED: [u8; 3] = [0x2a, 0x4d, 0x18];

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut packed = GzEncoder::new(Vec::new(), Compression::default());
        packed.write_all(text).unwrap();
        packed.finish().unwrap()
    }

    fn zstd(text: &[u8]) -> Vec<u8> {
        compress_to_vec(text, CompressionLevel::Fastest)
    }

    fn read(packed: Vec<u8>) -> io::Result<Vec<u8>> {
        let mut text = Vec::new();
        unpacked(Cursor::new(packed))?.read_to_end(&mut text).map(|_| text)
    }

    /// A megabyte of lines.
    fn text() -> Vec<u8> {
        (0..60_000).flat_map(|number: u64| format!("line {}\n", number * number).into_bytes()).collect()
    }

    #[test]
    fn what_is_packed_is_known_by_its_first_bytes_and_the_rest_is_read_as_it_is() {
        let text = text();
        assert!(read(text.clone()).unwrap() == text);
        assert!(read([BYTE_ORDER_MARK, &text].concat()).unwrap() == text, "the mark is no text");
        assert!(read(gzip(&text)).unwrap() == text && read(zstd(&text)).unwrap() == text);
        for plain in [&b""[..], b"{", b"\x1f", b"\x28\xb5\x2f", b"Q*M\x17"] {
            assert_eq!(read(plain.to_vec()).unwrap(), plain);
        }
    }

    #[test]
    fn packed_pieces_one_after_the_other_are_one_text() {
        let [one, other] = [&b"one\n"[..], b"other\n"];
        assert_eq!(read([gzip(one), gzip(b""), gzip(other)].concat()).unwrap(), b"one\nother\n");
        let skipped = [&[0x5a, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"abc"].concat();
        let frames = [skipped.clone(), zstd(one), skipped, zstd(b""), zstd(other)].concat();
        assert_eq!(read(frames).unwrap(), b"one\nother\n");
    }

    #[test]
    fn a_packed_file_that_is_cut_off_or_damaged_is_no_shorter_text() {
        let text = text();
        for (packer, packed) in [("gzip", gzip(&text)), ("zstd", zstd(&text))] {
            let promise = format!("packed by {packer}, and damaged or cut off: ");
            for cut in [packed.len() / 2, packed.len() - 1] {
                let error = read(packed[..cut].to_vec()).unwrap_err().to_string();
                assert!(error.starts_with(&promise), "{cut} of {}: {error}", packed.len());
            }
            let mut damaged = packed.clone();
            *damaged.last_mut().unwrap() ^= 1;
            assert!(read(damaged).unwrap_err().to_string().starts_with(&promise), "{packer}");
        }
    }
}
