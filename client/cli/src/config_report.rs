//! The values of a configuration, as a list of names and values.

use larder_coordinator::Config as CoordinatorConfig;
use larder_net::trace::Sampler;
use larder_node::limits::{ActorLimits, Limits};
use serde_json::{Map, Value};

use crate::output;

/// Names and values, in the order in which people read them.
#[derive(Debug, Default)]
pub(crate) struct ConfigReport {
    values: Vec<(String, Value)>,
    /// Warnings: parts that work, but not as they should.
    pub(crate) warnings: Vec<String>,
}

impl ConfigReport {
    /// The report of a node's configuration on a machine.
    pub(crate) fn of_node(limits: &Limits) -> Self {
        let mut report = Self::default();
        report.add("name", limits.name.clone());
        report.add("http", limits.http_listen.to_string());
        for (device, actor) in limits.actors.iter().enumerate() {
            report.add_actor(device, actor);
        }
        for tenant in &limits.tenants {
            report.add(&format!("tenant {} socket", tenant.name), tenant.socket.display().to_string());
            if let Some(bytes) = tenant.max_bytes {
                report.add(&format!("tenant {} bytes", tenant.name), bytes);
            }
            report.add(&format!("tenant {} write windows bytes", tenant.name), tenant.max_window_bytes);
        }
        let session = &limits.session;
        report.add("sessions a tenant", session.max_sessions);
        report.add("write window bytes", session.max_window_bytes);
        report.add("leased blocks a session", session.max_leased_blocks);
        report.add("engines write into the arena", session.trust_engines);
        report.add("traces requests", limits.sampler != Sampler::default());
        if let Some(object) = &limits.object {
            report.add("object store", object.options.url.clone());
        }
        report.add_record(limits);
        report.add_cluster(limits);
        report.warnings =
            limits.mismatches.iter().map(ToString::to_string).chain(session.shortage()).collect();
        report
    }

    /// The report of a coordinator's configuration, which does not depend on the machine.
    pub(crate) fn of_coordinator(config: &CoordinatorConfig) -> Self {
        let mut report = Self::default();
        report.add("http", config.http.listen.to_string());
        report.add("peers", config.peer.listen.to_string());
        report.add("certificate", config.peer.certificate.display().to_string());
        report.add("trusts", config.peer.ca.display().to_string());
        report.add("state", config.state.path.display().to_string());
        let membership = &config.membership;
        report.add("heartbeat ms", membership.heartbeat_ms);
        report.add("suspect after ms", membership.suspect_after_ms);
        report.add("removed after ms", membership.remove_after_ms);
        report.add("removed where reported after ms", membership.remove_reported_after_ms);
        report.add("grace ms", membership.grace_ms);
        report.add("lost remembered ms", membership.remember_lost_ms);
        report.add("traces to", config.tracing.endpoint.clone().unwrap_or_else(|| "nowhere".to_owned()));
        report
    }

    /// All values by name.
    pub(crate) fn json(&self) -> Map<String, Value> {
        self.values.iter().cloned().collect()
    }

    /// A table for people.
    pub(crate) fn table(&self) -> String {
        let mut table = output::table(&["what", "comes to"]);
        for (name, value) in &self.values {
            let value = match value {
                Value::Number(number) if name.ends_with("bytes") => {
                    output::bytes(number.as_u64().unwrap_or(0))
                }
                Value::Number(number) => output::count(number.as_u64().unwrap_or(0)),
                Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            table.add_row([name, &value]);
        }
        table.to_string()
    }

    fn add(&mut self, name: &str, value: impl Into<Value>) {
        self.values.push((name.to_owned(), value.into()));
    }

    fn add_actor(&mut self, device: usize, actor: &ActorLimits) {
        let ActorLimits { pci, numa_node, cpus, interface, arena, store, disk, .. } = actor;
        let mut add = |name: &str, value: Value| self.add(&format!("device {device} {name}"), value);
        if let Some(pci) = pci {
            add("gpu", pci.to_string().into());
        }
        if let Some(numa_node) = numa_node {
            add("numa node", (*numa_node).into());
        }
        add("cpus", cpus.to_string().into());
        if let Some(interface) = interface {
            add("interface", interface.clone().into());
        }
        add("arena bytes", arena.bytes().into());
        add("extent bytes", arena.extent.bytes.into());
        if let Some(chunks) = store.capacity_chunks {
            add("chunks", chunks.into());
        }
        add("evicts above bytes", store.high_watermark_bytes.into());
        add("evicts down to bytes", store.low_watermark_bytes.into());
        add("policy", store.policy.to_string().into());
        add("pinned bytes", store.max_pinned_bytes.into());
        if let Some(disk) = disk.as_ref().map(|disk| &disk.options) {
            add("disk folder", disk.folder.display().to_string().into());
            add("disk bytes", disk.capacity_bytes.into());
            add("disk segment bytes", disk.segment_bytes.into());
        }
    }

    fn add_record(&mut self, limits: &Limits) {
        let Some(record) = &limits.record else { return };
        self.add("lookups recorded to", record.path.display().to_string());
        self.add("lookups recorded bytes", record.max_bytes.0 * (u64::from(record.old_files) + 1));
    }

    fn add_cluster(&mut self, limits: &Limits) {
        let Some(cluster) = &limits.cluster else { return };
        self.add("coordinator", cluster.coordinators.join(", "));
        self.add("peers", cluster.listen.to_string());
        if let Some(advertise) = cluster.advertise {
            self.add("peers find it at", advertise.to_string());
        }
        if let Some(zone) = &cluster.zone {
            self.add("zone", zone.clone());
        }
        self.add("certificate", cluster.credentials.certificate.display().to_string());
        self.add("trusts", cluster.credentials.ca.display().to_string());
        self.add("shares chunks", cluster.share);
        self.add("fetch deadline ms", cluster.fetch_deadline.as_millis() as u64);
        self.add("drain ms", cluster.drain.as_millis() as u64);
        self.add("drain bytes per second", cluster.drain_bytes_per_second);
        self.add("peer thread cpus", cluster.place.cpus.to_string());
    }
}
