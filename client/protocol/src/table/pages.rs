//! Tables as they are sent: pages that change one table into a newer table.
//!
//! A cluster of thousands of nodes has a table of a megabyte, and most changes concern one member. A follower gets the whole
//! table once, as pages that change the empty table, and then the changes. Pages come in order, on one stream.

use std::sync::Arc;

use rkyv::{Archive, Deserialize, Serialize};

use super::{Epoch, Member, NodeNumber, PARTITIONS, Table};
use crate::identity::is_name;
use crate::limits::MAX_MEMBERS;

/// A part of the change from one table to a newer table.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct TablePage {
    /// The table that is changed. The default epoch names the empty table.
    pub from: Epoch,
    /// The table after all pages.
    pub to: Epoch,
    /// Members that are gone, ascending.
    pub gone: Vec<NodeNumber>,
    /// Members that came or changed.
    pub members: Vec<Member>,
    /// Partitions that have another home.
    pub homes: Vec<NewHome>,
    /// Whether this is the last page.
    pub is_last: bool,
}

/// The home that a partition has from now on.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewHome {
    /// The partition.
    pub partition: u16,
    /// The partition's home.
    pub home: NodeNumber,
}

/// Puts the pages of one stream together.
#[derive(Debug, Clone, Default)]
pub struct TableReader {
    known: Arc<Table>,
    begun: Option<(Epoch, Table)>,
}

/// A page does not continue the pages before it, has a member without a valid name, or leads to no whole table. The stream is of
/// no use any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a page of table {to} does not fit the pages before it")]
pub struct WrongPage {
    /// The table that the page belongs to.
    pub to: Epoch,
}

/// The pages that change `from` into `to`. For the whole of `to`, `from` is the empty table.
#[must_use]
pub fn pages(from: &Table, to: &Table) -> Vec<TablePage> {
    let gone = from.members.iter().map(|member| member.number);
    let gone: Vec<_> = gone.filter(|&number| to.member(number).is_none()).collect();
    let is_new = |member: &&Member| from.member(member.number) != Some(*member);
    let members: Vec<Member> = to.members.iter().filter(is_new).cloned().collect();
    let homes = (0..).zip(&to.homes).map(|(partition, &home)| NewHome { partition, home });
    let homes: Vec<_> = homes.filter(|new| from.home(new.partition) != Some(new.home)).collect();
    let page = |members: &[Member]| TablePage {
        from: from.epoch,
        to: to.epoch,
        gone: Vec::new(),
        members: members.to_vec(),
        homes: Vec::new(),
        is_last: false,
    };
    let mut pages: Vec<_> = members.chunks(PAGE_MEMBERS).map(page).collect();
    if pages.is_empty() {
        pages.push(page(&[]));
    }
    pages[0].gone = gone;
    let last = pages.len() - 1;
    (pages[last].homes, pages[last].is_last) = (homes, true);
    pages
}

impl TableReader {
    /// Takes the next page. The last page returns the new table.
    ///
    /// # Errors
    /// [`WrongPage`]
    pub fn take(&mut self, page: TablePage) -> Result<Option<Arc<Table>>, WrongPage> {
        let wrong = WrongPage { to: page.to };
        let mut table = match self.begun.take() {
            Some((from, begun)) if (from, begun.epoch) == (page.from, page.to) => begun,
            Some(_) => return Err(wrong),
            None if page.from == Epoch::default() => Table::default(),
            None if page.from == self.known.epoch => Table::clone(&self.known),
            None => return Err(wrong),
        };
        table.epoch = page.to;
        if !page.gone.is_empty() {
            table.members.retain(|member| page.gone.binary_search(&member.number).is_err());
        }
        for member in page.members {
            if !is_name(&member.name) {
                return Err(wrong);
            }
            match table.members.binary_search_by_key(&member.number, |member| member.number) {
                Ok(at) => table.members[at] = member,
                Err(_) if table.members.len() >= MAX_MEMBERS => return Err(wrong),
                Err(at) => table.members.insert(at, member),
            }
        }
        if table.members.is_empty() {
            table.homes.clear();
        } else {
            table.homes.resize(usize::from(PARTITIONS), NodeNumber::default());
        }
        for NewHome { partition, home } in page.homes {
            *table.homes.get_mut(usize::from(partition)).ok_or(wrong)? = home;
        }
        if !page.is_last {
            self.begun = Some((page.from, table));
            return Ok(None);
        }
        if !table.is_consistent() {
            return Err(wrong);
        }
        self.known = Arc::new(table);
        Ok(Some(Arc::clone(&self.known)))
    }
}

/// Members of one page: with the longest names they fill half a message.
const PAGE_MEMBERS: usize = 1_024;

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::limits::MAX_PEER_MESSAGE_BYTES;
    use crate::membership::CoordinatorMessage;
    use crate::peer::Message as _;
    use crate::table::MemberState;

    fn member(number: u16, incarnation: u64, name: &str) -> Member {
        let address = SocketAddr::from(([1; 16], 65_535));
        Member {
            number: NodeNumber(number),
            name: name.to_owned(),
            incarnation,
            peer: address,
            http: address,
            devices: 8,
            weight: 1,
            state: MemberState::Alive,
        }
    }

    fn table(number: u64, numbers: &[u16], random: &mut fastrand::Rng) -> Table {
        let members = numbers.iter().map(|&at| member(at, random.u64(..3), &format!("node-{at}"))).collect();
        let home = |_| numbers[random.usize(..numbers.len())];
        let partitions = if numbers.is_empty() { 0 } else { PARTITIONS };
        let homes = (0..partitions).map(home).map(NodeNumber).collect();
        Table { epoch: Epoch { term: 1, number }, members, homes }
    }

    #[test]
    fn pages_lead_from_any_table_to_any_other() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut reader = TableReader::default();
        let mut last = Table::default();
        for number in 1..60 {
            let density = random.f64();
            let numbers: Vec<u16> = (1..3_000).filter(|_| random.f64() < density * density).collect();
            let next = table(number, &numbers, &mut random);
            let from = if random.u8(..4) == 0 { Table::default() } else { last };
            let pages = pages(&from, &next);
            assert!(pages[..pages.len() - 1].iter().all(|page| !page.is_last));
            let came = pages.into_iter().filter_map(|page| reader.take(page).unwrap());
            assert_eq!(came.collect::<Vec<_>>(), [Arc::new(next.clone())]);
            last = next;
        }
    }

    #[test]
    fn a_change_of_one_member_is_short_and_no_page_is_longer_than_a_message() {
        let name = "n".repeat(200);
        let members = |state| {
            let mut members: Vec<_> =
                (1..=MAX_MEMBERS as u16).map(|number| member(number, 7, &name)).collect();
            members[5].state = state;
            members
        };
        let homes: Vec<_> = (0..PARTITIONS).map(|at| NodeNumber(at % MAX_MEMBERS as u16 + 1)).collect();
        let epoch = |number| Epoch { term: 1, number };
        let first = Table { epoch: epoch(1), members: members(MemberState::Alive), homes: homes.clone() };
        let second = Table { epoch: epoch(2), members: members(MemberState::Suspect), homes };
        let bytes = |pages: Vec<TablePage>| -> Vec<usize> {
            pages.into_iter().map(|page| CoordinatorMessage::Table(page).encode().len()).collect()
        };
        let whole = bytes(pages(&Table::default(), &first));
        assert!(whole.iter().all(|&bytes| bytes < MAX_PEER_MESSAGE_BYTES), "{whole:?}");
        let change = bytes(pages(&first, &second));
        assert!(change.len() == 1 && change[0] < 600, "{change:?}");
    }

    #[test]
    fn a_page_that_does_not_fit_is_refused() {
        let mut random = fastrand::Rng::with_seed(2);
        let numbers: Vec<u16> = (1..2_000).collect();
        let [first, second, third] = [1, 2, 3].map(|number| table(number, &numbers, &mut random));
        let mut reader = TableReader::default();
        assert!(reader.take(pages(&first, &second).remove(0)).is_err(), "the first table never came");
        let mut whole = pages(&Table::default(), &first);
        assert_eq!(reader.take(whole.remove(0)), Ok(None));
        assert!(reader.take(pages(&Table::default(), &second).remove(0)).is_err(), "the first has not ended");
        let whole = pages(&Table::default(), &second).into_iter().map(|page| reader.take(page).unwrap());
        assert_eq!(whole.flatten().count(), 1, "a whole table comes after anything");
        let mut stranger = pages(&second, &third).pop().unwrap();
        stranger.gone.clone_from(&vec![NodeNumber(3)]);
        stranger.members.clear();
        assert_eq!(reader.take(stranger), Err(WrongPage { to: third.epoch }), "a home is no member");
        let nameless = ["", "a/b", &"n".repeat(1_000_000)].map(|name| {
            let page = TablePage { members: vec![member(1, 1, name)], ..pages(&second, &third).remove(0) };
            reader.clone().take(page)
        });
        assert_eq!(
            nameless,
            [const { Err(WrongPage { to: Epoch { term: 1, number: 3 } }) }; 3],
            "no node has this name"
        );
        let far = NewHome { partition: PARTITIONS, home: NodeNumber(1) };
        let mut page = pages(&second, &third).remove(0);
        page.homes = vec![far];
        assert!(reader.take(page).is_err());
    }
}
