//! The time until which a server's own certificate may be used.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

crate::metrics_table! {
    /// The own certificate of this process.
    pub struct CertificateMetrics: "Certificate", "coordinators, and nodes in a cluster" => {
        expires: IntGauge = "larder_certificate_expires_timestamp_seconds", "seconds", [],
            "Time at which the process's own certificate expires, or a coordinator's certificate for its console if that is earlier, since 1970; 0 if none expires";
    }
}

impl CertificateMetrics {
    /// Sets the end of the certificate; `None` if it never expires.
    pub fn show(&self, not_after: Option<SystemTime>) {
        let since = not_after.map(|time| time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs());
        self.expires.set(since.unwrap_or(0) as i64);
    }
}

/// The ends of all certificates of a process, of which the metric shows the earliest. Cloning shares.
#[derive(Debug, Clone)]
pub struct EarliestEnd {
    metrics: CertificateMetrics,
    ends: Arc<Mutex<BTreeMap<&'static str, SystemTime>>>,
}

impl EarliestEnd {
    /// Knows no certificate yet.
    pub fn new(metrics: CertificateMetrics) -> Self {
        Self { metrics, ends: Arc::default() }
    }

    /// Notes the end of a certificate; `None` if it never expires.
    pub fn note(&self, certificate: &'static str, not_after: Option<SystemTime>) {
        let mut ends = crate::lock(&self.ends);
        match not_after {
            Some(end) => _ = ends.insert(certificate, end),
            None => _ = ends.remove(certificate),
        }
        self.metrics.show(ends.values().min().copied());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus::Registry;

    use super::*;
    use crate::metrics::Part as _;

    #[test]
    fn of_several_certificates_the_end_of_the_earliest_is_shown() {
        let metrics = CertificateMetrics::register(&Registry::new()).unwrap();
        let (ends, at) = (EarliestEnd::new(metrics.clone()), |s| Some(UNIX_EPOCH + Duration::from_secs(s)));
        for (certificate, end, shown) in [
            ("own", at(9), 9),
            ("console", at(5), 5),
            ("own", at(7), 5),
            ("console", None, 7),
            ("own", None, 0),
        ] {
            ends.note(certificate, end);
            assert_eq!(metrics.expires.get(), shown);
        }
    }
}
