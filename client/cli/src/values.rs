//! Values of options, as people write them.

use std::time::Duration;

use bytesize::ByteSize;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use larder_core::placement::PlacementRule;
use larder_core::store::policy::PolicyName;

/// Bytes as people write them: `4096`, `64KiB`, `1.5 GB`; at least 1.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    match text.parse::<ByteSize>() {
        Ok(ByteSize(0)) => Err("must be at least 1 byte".into()),
        Ok(ByteSize(bytes)) => Ok(bytes),
        Err(_) => Err("not a number of bytes such as 4096, 64KiB or 1.5GB".into()),
    }
}

/// A time as people write it: `500ms`, `90s`, `10m`, `1h 30m`; whole milliseconds, at least one.
pub(crate) fn time(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).ok();
    let milliseconds = time.and_then(|time| u64::try_from(time.as_millis()).ok()).filter(|&ms| ms > 0);
    let wrong = "not a time such as 500ms, 90s, 10m, 1h or 1h 30m";
    milliseconds.map(Duration::from_millis).ok_or_else(|| wrong.to_owned())
}

/// The policies of a node, by name.
pub(crate) fn policy() -> impl TypedValueParser<Value = PolicyName> {
    let values = PolicyName::ALL.map(|name| PossibleValue::new(name.as_str()).help(name.about()));
    PossibleValuesParser::new(values).try_map(|name| name.parse::<PolicyName>())
}

/// The rules by which nodes place chunks, by name.
pub(crate) fn placement() -> impl TypedValueParser<Value = PlacementRule> {
    let values = PlacementRule::ALL.map(|rule| PossibleValue::new(<&str>::from(rule)));
    PossibleValuesParser::new(values).try_map(|name| name.parse::<PlacementRule>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        assert_eq!(bytes("4096"), Ok(4_096));
        assert_eq!(bytes("64KiB"), Ok(65_536));
        assert_eq!(bytes("1.5 GB"), Ok(1_500_000_000));
        assert!(bytes("0").is_err() && bytes("many").is_err() && bytes("-1").is_err());
    }

    #[test]
    fn times_are_read_as_people_write_them() {
        let ms = |text| time(text).map(|time| time.as_millis());
        assert_eq!(
            (ms("500ms"), ms("90s"), ms("10m"), ms("2h")),
            (Ok(500), Ok(90_000), Ok(600_000), Ok(7_200_000))
        );
        assert_eq!((ms("1h 30m"), ms("1d")), (Ok(5_400_000), Ok(86_400_000)));
        for text in ["", "5", "0", "0s", "s", "-1s", "900us", "99999999999999999999s", "9999999999999999h"] {
            assert!(time(text).is_err(), "{text}");
        }
    }
}
