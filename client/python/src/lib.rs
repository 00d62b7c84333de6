//! The native part of the Python package `larder-kv`: a session's requests, leases and copies for Python.

#[macro_use]
mod define;

mod answers;
mod errors;
mod gpu;
mod handoff;
mod lease;
mod memory;
mod namespace;
mod node_copies;
mod open;
mod pages;
mod prefetches;
mod process;
mod requests;
mod reservation;
mod scatter;
mod session;
mod ticket;
mod view;
mod waiting;

/// The native part of `larder_kv`, which is what to import.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::answers::{Found, Pinned, Progress, Span, Stats};
    #[pymodule_export]
    use crate::gpu::{Gpu, GpuPagedMemory};
    #[pymodule_export]
    use crate::handoff::{Follow, InPlace, StagedLayers};
    #[pymodule_export]
    use crate::lease::Lease;
    #[pymodule_export]
    use crate::namespace::{Chain, Namespace};
    #[pymodule_export]
    use crate::node_copies::{CopyProgress, NodeCopy, NodeTensors};
    #[pymodule_export]
    use crate::pages::PagedMemory;
    #[pymodule_export]
    use crate::prefetches::{PendingLease, Prefetches};
    #[pymodule_export]
    use crate::reservation::{Reservation, StagedChunk};
    #[pymodule_export]
    use crate::scatter::ScatteredMemory;
    #[pymodule_export]
    use crate::session::{AsyncSession, Session};
    #[pymodule_export]
    use crate::ticket::Ticket;
    #[pymodule_export]
    use crate::view::BlockView;

    use pyo3::prelude::*;
    use pyo3::types::PyModule;

    #[pymodule_export]
    const MAX_COPIES: usize = larder_device::order::MAX_COPIES;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let end_visits = pyo3::wrap_pyfunction!(crate::waiting::end_visits, module)?;
        module.py().import("atexit")?.call_method1("register", (end_visits,))?;
        Ok(())
    }
}
