//! Measures Larder against yardsticks: the best that the machine can do.

pub mod crowd;
pub mod elsewhere;
pub mod load;
pub mod measure;
pub mod peer;
pub mod placement;
pub mod prefetch;
pub mod quic;
pub mod scale;
pub mod session;
pub mod side_by_side;
pub mod store;
pub mod tcp;
pub mod timeline;
pub mod transfer;
pub mod yardsticks;

use comfy_table::Table;
use serde::{Deserialize, Serialize};

use crate::output;

/// One measurement beside the yardstick of the same run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// The name of the measured work.
    pub name: String,
    /// The measured figure.
    pub value: f64,
    /// Unit of both values.
    pub unit: String,
    /// The name of the yardstick.
    pub yardstick: String,
    /// The yardstick's figure.
    pub yardstick_value: f64,
    /// `value / yardstick_value`.
    pub ratio: f64,
}

impl Measurement {
    /// Throughput of passes over `bytes` each, from the seconds of each pass.
    pub fn throughput(name: &str, yardstick: &str, bytes: u64, seconds: f64, yardstick_seconds: f64) -> Self {
        let gigabytes_per_second = |seconds: f64| bytes as f64 / seconds / 1e9;
        let values = [seconds, yardstick_seconds].map(gigabytes_per_second);
        Self::new(name, yardstick, "GB/s", values)
    }

    /// Thousands a second, from numbers in a second.
    pub fn thousands(name: &str, yardstick: &str, a_second: [f64; 2]) -> Self {
        Self::new(name, yardstick, "k/s", a_second.map(|number| number / 1e3))
    }

    /// Time of one pass.
    pub fn microseconds(name: &str, yardstick: &str, seconds: f64, yardstick_seconds: f64) -> Self {
        Self::new(name, yardstick, "us", [seconds, yardstick_seconds].map(|seconds| seconds * 1e6))
    }

    /// Time of one pass.
    pub fn nanoseconds(name: &str, yardstick: &str, seconds: f64, yardstick_seconds: f64) -> Self {
        Self::new(name, yardstick, "ns", [seconds, yardstick_seconds].map(|seconds| seconds * 1e9))
    }

    /// Bytes for each chunk.
    pub fn bytes(name: &str, yardstick: &str, values: [f64; 2]) -> Self {
        Self::new(name, yardstick, "bytes", values)
    }

    /// CPU seconds for 10^9 bytes.
    pub fn cpu(name: &str, yardstick: &str, values: [f64; 2]) -> Self {
        Self::new(name, yardstick, "CPU-s/GB", values)
    }

    fn new(name: &str, yardstick: &str, unit: &str, [value, yardstick_value]: [f64; 2]) -> Self {
        Self {
            name: name.into(),
            value,
            unit: unit.into(),
            yardstick: yardstick.into(),
            yardstick_value,
            ratio: value / yardstick_value,
        }
    }
}

/// The measurements as a table.
pub fn table(measurements: &[Measurement]) -> Table {
    let mut table = output::table(&["what", "value", "yardstick", "value", "unit", "ratio"]);
    for m in measurements {
        let [value, yardstick_value] = [m.value, m.yardstick_value].map(|value| {
            // For a small value, one digit after the point would hide a difference of some percent.
            if value < 10.0 { format!("{value:.2}") } else { format!("{value:.1}") }
        });
        let ratio = format!("{:.2}", m.ratio);
        table.add_row([&m.name, &value, &m.yardstick, &yardstick_value, &m.unit, &ratio]);
    }
    for column in [1, 3, 5] {
        output::align_right(&mut table, column);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_of_the_values_shown_whatever_the_unit() {
        let throughput = Measurement::throughput("get", "memcpy", 4_000_000, 2e-3, 1e-3);
        assert_eq!((throughput.value, throughput.yardstick_value, throughput.ratio), (2.0, 4.0, 0.5));
        let latency = Measurement::nanoseconds("hit", "probe", 2e-7, 1e-7);
        assert!((latency.value - 200.0).abs() < 1e-6 && (latency.ratio - 2.0).abs() < 1e-9);
        assert!(table(&[throughput, latency]).to_string().contains("0.50"));
    }
}
