//! A lookup in the directory: what is asked of whom, and what the answers come to.

use std::collections::BTreeMap;

use larder_protocol::peer::RowSpan;
use larder_protocol::table::{MemberState, NodeNumber, RowKey, Table};

use super::{Holders, RowCache};
use crate::clock::Millis;

/// A lookup under way.
#[derive(Debug)]
pub(super) struct Lookup {
    rows: Vec<RowKey>,
    answers: Vec<Holders>,
    /// Positions that each home is asked for.
    pub(super) homes: BTreeMap<NodeNumber, Vec<u32>>,
    /// Rows that the cache had.
    pub(super) cached: usize,
}

impl Lookup {
    /// Answers what the cache knows, and says which home to ask for the rest.
    pub(super) fn plan(rows: Vec<RowKey>, table: &Table, cache: &mut RowCache, now: Millis) -> Self {
        let mut lookup =
            Self { answers: vec![Holders::new(); rows.len()], rows, homes: BTreeMap::new(), cached: 0 };
        for (position, row) in (0..).zip(&lookup.rows) {
            if let Some(known) = cache.get(row, now) {
                lookup.answers[position as usize] = known.clone();
                lookup.cached += 1;
            } else if let Some(home) = table.home(row.run.partition()) {
                lookup.homes.entry(home).or_default().push(position);
            }
        }
        lookup
    }

    /// The rows that a home is asked for.
    pub(super) fn rows_of(&self, home: NodeNumber) -> Vec<RowKey> {
        let positions = self.homes.get(&home).into_iter().flatten();
        positions.map(|&position| self.rows[position as usize]).collect()
    }

    /// What a home answered, as spans over what it was asked.
    pub(super) fn answered(
        &mut self,
        home: NodeNumber,
        spans: &[RowSpan],
        cache: &mut RowCache,
        now: Millis,
    ) {
        let Some(positions) = self.homes.get(&home) else { return };
        for span in spans {
            let asked = span.from as usize..(span.to as usize).min(positions.len());
            for &position in positions.get(asked).unwrap_or_default() {
                self.answers[position as usize].push(span.holder);
            }
        }
        for &position in positions {
            cache.put(self.rows[position as usize], &self.answers[position as usize], now);
        }
    }

    /// Who can be asked for each chunk, the most promising first: members but this one, no silent ones, suspects last.
    pub(super) fn finish(
        self,
        table: &Table,
        own: NodeNumber,
        is_silent: impl Fn(NodeNumber) -> bool,
    ) -> Vec<Holders> {
        let judge = |mut holders: Holders| {
            holders.retain(|holder| {
                holder.node != own && table.member(holder.node).is_some() && !is_silent(holder.node)
            });
            let is_suspect =
                |node| table.member(node).is_some_and(|member| member.state == MemberState::Suspect);
            holders.sort_by_key(|holder| is_suspect(holder.node));
            holders
        };
        self.answers.into_iter().map(judge).collect()
    }
}
