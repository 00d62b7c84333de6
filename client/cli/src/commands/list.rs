//! `larder list`: the pins, sessions, tenants or namespaces of nodes.

use std::process::ExitCode;

use clap::ValueEnum;
use larder_node::{NamespaceStatus, PinStatus, SessionStatus, TenantStatus};
use serde::Deserialize as _;
use serde_json::Value;

use crate::failure::FAILED;
use crate::listing::{Cell, Column, Format, FormatArgs, Listing, column, wide};
use crate::survey::{Servers, Surveyed};
use crate::{http, output};

/// List the pins, sessions, tenants or namespaces of nodes
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder list sessions                        The engines that use the cluster, with their processes
  larder list pins --node 127.0.0.1:9440      The pins of one node, and how long they last
  larder list tenants -o wide                 Each tenant's part of each node, and its socket
  larder list namespaces -o tsv | cut -f 4    Fields between tabs, for scripts

JSON is one array: the entries that each node serves at /pins, /sessions, /tenants or /namespaces, each with its `node`.

Exit status: 0 if every node answers; 1 if a node or one of its actors does not, or a node is lost (`larder forget`); 2 after wrong arguments.")]
pub(crate) struct Args {
    /// The list to show
    #[arg(value_enum)]
    what: What,

    #[command(flatten)]
    servers: Servers,

    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// Prompts that are kept from eviction
    Pins,
    /// Open sessions of engines
    Sessions,
    /// Each tenant's part of a node
    Tenants,
    /// Namespaces that sessions registered or chunks belong to
    Namespaces,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let survey = args.servers.targets()?.survey()?;
    let (mut rows, mut silent) = (Vec::new(), survey.lost());
    for node in &survey.nodes {
        match args.what.ask(node) {
            Ok(listed) => {
                rows.extend(listed.into_iter().map(|row| (node.name.as_str(), row)));
                silent.extend(node.silent_actors());
            }
            Err(error) => silent.push(format!("{} does not answer: {error}", node.name)),
        }
    }
    let format = args.format.format();
    if format == Format::Json {
        let with_node = |(node, row): (&str, Value)| {
            let Value::Object(mut row) = row else { return row };
            row.insert("node".to_owned(), node.into());
            Value::Object(row)
        };
        output::print_json(&rows.into_iter().map(with_node).collect::<Vec<_>>())?;
    } else {
        let mut list = Listing::new(&args.what.columns());
        for (node, row) in rows {
            list.add([Cell::from(node)].into_iter().chain(args.what.cells(&row)?));
        }
        output::print(&list.text(format))?;
    }
    silent.iter().for_each(|silent| output::note(format_args!("{silent}")));
    Ok(if silent.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

impl What {
    fn ask(self, node: &Surveyed) -> Result<Vec<Value>, String> {
        node.said.as_ref().map_err(Clone::clone)?;
        let path = match self {
            Self::Pins => "/pins",
            Self::Sessions => "/sessions",
            Self::Tenants => "/tenants",
            Self::Namespaces => "/namespaces",
        };
        http::get_json(&node.http, path).map_err(|error| format!("{error:#}"))
    }

    fn columns(self) -> Vec<Column> {
        let (narrow, more): (&[_], &[_]) = match self {
            Self::Pins => (&["node", "device", "pin", "tenant", "chunks", "memory", "left"], &[]),
            Self::Sessions => (
                &["node", "device", "session", "tenant", "client", "pid", "leases"],
                &["leased blocks", "reservations", "reserved", "write window", "namespaces"],
            ),
            Self::Tenants => (&["node", "tenant", "sessions", "pins", "memory", "of"], &["pinned", "socket"]),
            Self::Namespaces => {
                (&["node", "tenant", "model", "chunk tokens", "sessions", "chunks"], &["fingerprint", "hash"])
            }
        };
        let narrow = narrow.iter().map(|&name| column(name));
        narrow.chain(more.iter().map(|&name| wide(name))).collect()
    }

    /// The cells of a row, after the node's name.
    fn cells(self, row: &Value) -> anyhow::Result<Vec<Cell>> {
        Ok(match self {
            Self::Pins => {
                let PinStatus { device, pin, tenant, chunks, bytes, seconds_left } =
                    PinStatus::deserialize(row)?;
                let left = Cell::Seconds(seconds_left);
                // A pin's number is a name: it has no groups of digits.
                let pin = pin.to_string().into();
                vec![
                    Cell::Count(device.into()),
                    pin,
                    tenant.into(),
                    Cell::Count(chunks),
                    Cell::Bytes(bytes),
                    left,
                ]
            }
            Self::Sessions => {
                let session = SessionStatus::deserialize(row)?;
                vec![
                    Cell::Count(session.device.into()),
                    session.session.to_string().into(),
                    session.tenant.into(),
                    session.client.into(),
                    Cell::of(session.pid, |pid| pid.to_string().into()),
                    Cell::Count(session.leases),
                    Cell::Count(session.leased_blocks),
                    Cell::Count(session.reservations),
                    Cell::Bytes(session.reserved_bytes),
                    Cell::Bytes(session.window_bytes),
                    Cell::Count(session.namespaces),
                ]
            }
            Self::Tenants => {
                let tenant = TenantStatus::deserialize(row)?;
                vec![
                    tenant.tenant.into(),
                    Cell::Count(tenant.sessions),
                    Cell::Count(tenant.pins),
                    Cell::Bytes(tenant.arena_bytes),
                    Cell::Bytes(tenant.arena_limit_bytes),
                    Cell::Bytes(tenant.pinned_bytes),
                    tenant.socket.display().to_string().into(),
                ]
            }
            Self::Namespaces => {
                let hash = row["hash"]["name"].as_str().map(str::to_owned);
                let namespace = NamespaceStatus::deserialize(row)?;
                vec![
                    namespace.tenant.into(),
                    namespace.model.into(),
                    Cell::Count(namespace.chunk_tokens.into()),
                    Cell::Count(namespace.sessions),
                    Cell::Count(namespace.chunks),
                    namespace.fingerprint.into(),
                    Cell::of(hash, Cell::from),
                ]
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_list_has_a_cell_for_each_column() {
        for what in What::value_variants() {
            let row = json!({
                "tenant": "a", "model": "m", "fingerprint": "0", "chunk_tokens": 16, "sessions": 1, "chunks": 2,
                "hash": {"name": "larder"}, "later": true
            });
            let cells = what.cells(&row).unwrap();
            assert_eq!(cells.len() + 1, what.columns().len(), "{what:?}");
        }
    }
}
