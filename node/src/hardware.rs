//! The memory, CPUs and interfaces that a node got near its GPUs, for its log, its status and its metrics.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::arena::{ArenaPlacement, PlacementSource};
use crate::limits::{ActorLimits, Limits, Mismatch};
use crate::metrics::Metrics;

/// The parts of the machine that a node got.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HardwareStatus {
    /// Each device's part, first to last.
    pub devices: Vec<DeviceHardware>,
    /// The CPUs of the thread between nodes, if there is one.
    pub peer_cpus: Option<String>,
    /// The network interface of the address where peers reach the node; `None` if the configuration does not give this address.
    pub peer_interface: Option<String>,
    /// The parts that are not in their best place.
    pub mismatches: Vec<String>,
}

/// The parts of the machine that a device's actor got.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceHardware {
    /// The device's number.
    pub device: u16,
    /// The device's GPU, if it has one.
    pub gpu: Option<String>,
    /// The NUMA node of the device's GPU.
    pub numa_node: Option<u32>,
    /// The CPUs of the device's threads, such as `0-3,8-11`.
    pub cpus: String,
    /// The network interface nearest to the device's GPU.
    pub nearest_interface: Option<String>,
    /// The NUMA node where the device's arena should be.
    pub memory_numa_node: Option<u32>,
    /// Bytes of the arena in reserved huge pages.
    pub huge_bytes: u64,
    /// Bytes of the arena in transparent huge pages.
    pub transparent_huge_bytes: u64,
    /// Bytes of the arena in pages of 4 KiB.
    pub ordinary_bytes: u64,
    /// Bytes of the arena on each NUMA node, estimated from a sample of pages.
    pub bytes_on_numa_nodes: BTreeMap<u32, u64>,
    /// Bytes of the arena that are in a wrong place.
    pub misplaced_bytes: u64,
    /// The source of these facts: `move_pages`, `numa_maps`, or `unknown` if there is none.
    pub placement_source: String,
    /// Advice for more huge pages, if there is any.
    pub advice: Option<String>,
}

impl HardwareStatus {
    /// Takes the results of resolving the configuration. The devices' parts are added when their memory is there. Warns of parts
    /// that cannot be in their best place, and counts them.
    pub(crate) fn new(limits: &Limits, metrics: &Metrics) -> Self {
        for mismatch in &limits.mismatches {
            tracing::warn!("{mismatch}");
        }
        limits.mismatches.iter().for_each(|mismatch| metrics.mismatched(mismatch.into()));
        let place = limits.cluster.as_ref().map(|cluster| &cluster.place);
        Self {
            devices: Vec::new(),
            peer_cpus: place.map(|place| place.cpus.to_string()),
            peer_interface: place.and_then(|place| place.interface.clone()),
            mismatches: limits.mismatches.iter().map(Mismatch::to_string).collect(),
        }
    }
}

impl DeviceHardware {
    /// Logs where a device's arena is, and exports it to the metrics.
    pub(crate) fn of(
        device: u16,
        limits: &ActorLimits,
        placement: &ArenaPlacement,
        metrics: &Metrics,
    ) -> Self {
        export(device, placement, metrics);
        let advice = placement.advice(limits.arena.extent.huge_pages);
        let hardware = Self {
            device,
            gpu: limits.pci.map(|pci| pci.to_string()),
            numa_node: limits.numa_node,
            cpus: limits.cpus.to_string(),
            nearest_interface: limits.interface.clone(),
            memory_numa_node: limits.arena.extent.numa_node,
            huge_bytes: placement.huge_bytes,
            transparent_huge_bytes: placement.transparent_bytes,
            ordinary_bytes: placement.ordinary_bytes(),
            bytes_on_numa_nodes: placement
                .pages_on
                .keys()
                .map(|&node| (node, placement.bytes_on(node)))
                .collect(),
            misplaced_bytes: placement.misplaced_bytes(),
            placement_source: <&str>::from(placement.source).to_owned(),
            advice,
        };
        let Self { gpu, cpus, nearest_interface, advice, .. } = &hardware;
        let got = placement.summary();
        tracing::info!(
            device,
            gpu,
            cpus,
            nearest_interface,
            got,
            for_more = advice,
            "memory and CPUs of a device"
        );
        hardware
    }
}

/// Exports where an arena's memory is. A mismatch is a warning and a number, never a failed start.
fn export(device: u16, placement: &ArenaPlacement, metrics: &Metrics) {
    metrics.placed(device, "huge_pages", placement.huge_bytes);
    metrics.placed(device, "transparent_huge_pages", placement.transparent_bytes);
    metrics.placed(device, "ordinary_pages", placement.ordinary_bytes());
    for &node in placement.pages_on.keys() {
        metrics.placed(device, &format!("numa_node_{node}"), placement.bytes_on(node));
    }
    match placement.source {
        PlacementSource::Unknown => metrics.placed(device, "unknown", placement.bytes),
        _ if placement.asked.is_some() => metrics.placed(device, "misplaced", placement.misplaced_bytes()),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::Arena;
    use crate::config::Config;
    use crate::host::tests::machines::{facts, quarters};

    #[test]
    fn what_was_got_is_in_the_status_and_in_the_metrics_and_a_mismatch_is_counted() {
        let config =
            Config::parse("gpus = [{ pci = '0000:41:00.0' }]\n[host]\narena_bytes = '4MiB'").unwrap();
        let mut limits = config.resolve(&facts(&quarters())).unwrap();
        let metrics = Metrics::new().unwrap();
        let status = HardwareStatus::new(&limits, &metrics);
        assert!(status.mismatches[0].contains("NUMA node 1 has no memory"), "{status:?}");

        let actor = &mut limits.actors[0];
        actor.arena.cpus = crate::threads::pinned_to().unwrap();
        actor.arena.extent.numa_node = Some(1_000);
        let arena = Arena::create(&actor.arena).unwrap();
        let device = DeviceHardware::of(0, actor, &arena.placement(), &metrics);
        assert_eq!((device.numa_node, device.nearest_interface.as_deref()), (Some(1), Some("eth1")));
        let pages = device.huge_bytes + device.transparent_huge_bytes + device.ordinary_bytes;
        assert_eq!((pages, device.placement_source.as_str()), (4 << 20, "move_pages"));
        assert_eq!(device.misplaced_bytes, 4 << 20, "no machine has a node of that number");

        let text = metrics.render().unwrap();
        for line in [
            "larder_placement_mismatches{kind=\"no_memory\"} 1",
            "larder_arena_placement_bytes{device=\"0\",place=\"misplaced\"} 4194304",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
