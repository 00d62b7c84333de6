//! The speeds of blocks of a size, as `larder bench --json` measured them.

use std::io;
use std::path::Path;

use crate::bench::Measurement;

/// Speeds by block size, of this machine.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredSpeeds {
    /// From a node's memory to an engine on the same host.
    pub host: SpeedsBySize,
    /// From another node.
    pub peer: SpeedsBySize,
}

/// Bytes a second, by bytes of a block, ascending; at least one.
#[derive(Debug, Clone, PartialEq)]
pub struct SpeedsBySize(Vec<(f64, f64)>);

/// Why speeds cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum MeasuredError {
    /// The file cannot be read.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// The file is no output of the bench.
    #[error("not the output of `larder bench --json`: {0}")]
    Format(#[from] serde_json::Error),
    /// The output lacks a measurement.
    #[error("it has no `{0}`: write it with `larder bench --filter get --json`")]
    Missing(&'static str),
}

impl MeasuredSpeeds {
    /// Reads the output of `larder bench --json`.
    ///
    /// # Errors
    /// The file cannot be read, is another one, or lacks gets.
    pub fn read(path: &Path) -> Result<Self, MeasuredError> {
        let measured: Vec<Measurement> = serde_json::from_slice(&std::fs::read(path)?)?;
        let of =
            |prefix: &'static str| SpeedsBySize::of(&measured, prefix).ok_or(MeasuredError::Missing(prefix));
        Ok(Self { host: of("get_")?, peer: of("peer_get_")? })
    }
}

impl SpeedsBySize {
    /// The speeds of the measurements whose names are a prefix and a block size.
    fn of(measured: &[Measurement], prefix: &str) -> Option<Self> {
        let speed = |one: &Measurement| {
            let bytes: bytesize::ByteSize = one.name.strip_prefix(prefix)?.parse().ok()?;
            (one.unit == "GB/s" && one.value > 0.0).then_some((bytes.as_u64() as f64, one.value * 1e9))
        };
        let mut speeds: Vec<(f64, f64)> = measured.iter().filter_map(speed).collect();
        speeds.sort_by(|one, other| one.0.total_cmp(&other.0));
        speeds.dedup_by_key(|speed| speed.0);
        (!speeds.is_empty()).then_some(Self(speeds))
    }

    /// Bytes a second of blocks of this size: between two measured sizes by the logarithm of the size, beyond them as at the
    /// nearest.
    pub fn at(&self, block_bytes: u64) -> f64 {
        let bytes = block_bytes as f64;
        let above = self.0.iter().position(|&(measured, _)| measured >= bytes);
        match above {
            Some(0) => self.0[0].1,
            Some(at) => {
                let [(from, low), (to, high)] = [self.0[at - 1], self.0[at]];
                low + (high - low) * (bytes / from).ln() / (to / from).ln()
            }
            None => self.0.last().map_or(0.0, |last| last.1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measurement(name: &str, unit: &str, value: f64) -> Measurement {
        let yardstick = "memcpy".into();
        Measurement {
            name: name.into(),
            value,
            unit: unit.into(),
            yardstick,
            yardstick_value: 1.0,
            ratio: value,
        }
    }

    #[test]
    fn speeds_between_measured_sizes_lie_between_theirs_and_beyond_are_the_nearest() {
        let measured = [
            measurement("get_32MiB", "GB/s", 8.0),
            measurement("get_256KiB", "GB/s", 2.0),
            measurement("get_4MiB", "GB/s", 6.0),
            measurement("get_4MiB", "CPU-s/GB", 1.0),
            measurement("get_4MiB_verify_always", "GB/s", 1.0),
        ];
        let speeds = SpeedsBySize::of(&measured, "get_").unwrap();
        for (bytes, expected) in [(1, 2e9), (256 << 10, 2e9), (1 << 20, 4e9), (4 << 20, 6e9), (1 << 30, 8e9)]
        {
            assert!((speeds.at(bytes) / expected - 1.0).abs() < 1e-9, "{bytes}: {}", speeds.at(bytes));
        }
        assert_eq!(SpeedsBySize::of(&measured, "peer_get_"), None);
    }

    #[test]
    fn a_file_that_lacks_gets_says_how_to_write_one() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let write = |measured: &[Measurement]| {
            std::fs::write(file.path(), serde_json::to_vec(measured).unwrap()).unwrap();
            MeasuredSpeeds::read(file.path())
        };
        assert!(
            write(&[measurement("get_4MiB", "GB/s", 1.0)]).unwrap_err().to_string().contains("`peer_get_`")
        );
        assert!(
            write(&[measurement("get_4MiB", "GB/s", 1.0), measurement("peer_get_4MiB", "GB/s", 1.0)]).is_ok()
        );
        std::fs::write(file.path(), "{}").unwrap();
        assert!(MeasuredSpeeds::read(file.path()).unwrap_err().to_string().contains("larder bench --json"));
    }
}
