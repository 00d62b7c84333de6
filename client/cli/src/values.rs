//! Values of options, as people write them.

use std::time::Duration;

use bytesize::ByteSize;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use larder_core::store::policy::PolicyName;

/// Bytes as people write them: `4096`, `64KiB`, `1.5 GB`; at least 1.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    match text.parse::<ByteSize>() {
        Ok(ByteSize(0)) => Err("must be at least 1 byte".into()),
        Ok(ByteSize(bytes)) => Ok(bytes),
        Err(_) => Err("not a number of bytes such as 4096, 64KiB or 1.5GB".into()),
    }
}

/// A time as people write it: `500ms`, `90s`, `10m`, `1h`; at least a millisecond.
pub(crate) fn time(text: &str) -> Result<Duration, String> {
    let wrong = || "not a time such as 500ms, 90s, 10m or 1h".to_owned();
    let unit = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let number: u64 = text[..unit].parse().map_err(|_| wrong())?;
    let unit_ms = match &text[unit..] {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(wrong()),
    };
    let time = number.checked_mul(unit_ms).filter(|&ms| ms > 0).ok_or_else(wrong)?;
    Ok(Duration::from_millis(time))
}

/// The policies of a node, by name.
pub(crate) fn policy() -> impl TypedValueParser<Value = PolicyName> {
    let values = PolicyName::ALL.map(|name| PossibleValue::new(name.as_str()).help(name.about()));
    PossibleValuesParser::new(values).try_map(|name| name.parse::<PolicyName>())
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
        for text in ["", "5", "0s", "s", "-1s", "1.5s", "1d", "99999999999999999999s", "9999999999999999h"] {
            assert!(time(text).is_err(), "{text}");
        }
    }
}
