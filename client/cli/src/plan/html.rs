//! A report with charts.
use super::{Outcome, Workload, advice::Prices};
/// The report.
#[must_use]
pub fn report(_trace: &str, _workload: &Workload, _outcomes: &[Outcome], _prices: &Prices) -> String {
    String::new()
}
