//! One definition makes a section of a table and the handles of its metrics.

/// Makes a struct whose fields are the handles of metrics, and a [`Part`](crate::metrics::Part) of a table.
///
/// A row is a field and its type in the crate `prometheus`, then name, unit, labels, meaning, and the buckets of a histogram.
/// Fields are as visible as their struct.
#[macro_export]
macro_rules! metrics_table {
    ($(#[$doc:meta])* $vis:vis struct $part:ident: $title:expr, $only:expr => {
        $($field:ident: $type:ident = $name:literal, $unit:literal, [$($label:expr),*],
            $help:literal $(in [$($bucket:expr),+])?;)+
    }) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        $vis struct $part { $(#[doc = $help] $vis $field: ::prometheus::$type,)+ }

        impl $crate::metrics::Part for $part {
            const SECTION: $crate::metrics::Section = $crate::metrics::Section {
                title: $title,
                only: $only,
                metrics: &[$($crate::metrics::Metric {
                    name: $name,
                    kind: <::prometheus::$type as $crate::metrics::Handle>::KIND
                        $(.in_buckets(&[$($bucket),+]))?,
                    unit: $unit,
                    labels: &[$($label),*],
                    help: $help,
                }),+],
            };

            fn register_with(
                registry: &::prometheus::Registry,
                fixed: &[(&str, &str)],
            ) -> ::std::result::Result<Self, ::prometheus::Error> {
                let [$($field),+] = Self::SECTION.metrics else { unreachable!("each field has a row") };
                Ok(Self { $($field: $crate::metrics::register(registry, $field, fixed)?,)+ })
            }
        }
    };
}
