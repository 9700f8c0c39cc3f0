//! Two guests with twins of all kinds, and what of them is merged as the kernel has it.

use crate::memory::Pages;
use std::collections::HashMap;
use std::os::unix::fs::FileExt;

/// Pages of each of two guests.
pub const PAGES: usize = 1500;
/// Words of a page that no key line has: the first and the last.
const OUTSIDE_KEYS: [usize; 2] = [0, 511];

/// What a page of a guest holds: a pattern, and a word that is changed in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Content {
    /// The pattern; 0 is a page of zeros.
    pub id: u64,
    changed: Option<(usize, u64)>,
}

/// Zero pages, pages of one guest, twins within a guest and across guests, and pages whose keys are equal although they
/// differ, in the first word or the last.
#[must_use]
pub fn content(guest: usize, page: usize) -> Content {
    let (guest, page) = (guest as u64, page as u64);
    let (id, changed) = match page % 10 {
        0 => (0, None),
        1 => (1_000_000 + guest * 10_000 + page, None),
        2 => (2_000_000 + page / 40, None),
        3..6 => (3_000_000 + page, None),
        at @ 6..8 => {
            let word = OUTSIDE_KEYS[usize::from(at == 7)];
            (4_000_000 + page / 100, Some((word, page % 3)))
        }
        _ => (5_000_000, Some((OUTSIDE_KEYS[1], page / 30))),
    };
    Content { id, changed }
}

/// A guest with its content.
#[must_use]
pub fn guest(number: usize) -> Pages {
    let pages = Pages::map(PAGES);
    for page in 0..PAGES {
        write(&pages, page, content(number, page));
    }
    pages
}

fn write(pages: &Pages, page: usize, content: Content) {
    pages.fill(page, content.id);
    if let Some((word, value)) = content.changed {
        pages.store(page, word, value);
    }
}

/// Whether a page holds that.
#[must_use]
pub fn holds(pages: &Pages, page: usize, content: Content) -> bool {
    (0..512).all(|word| {
        let expected = match content.changed {
            Some((at, value)) if at == word => value,
            _ => pages.expected(content.id, word),
        };
        pages.load(page, word) == expected
    })
}

/// For each page of all guests, the first page that it shares its memory with; `None` if it is alone or zero.
pub type Groups = Vec<Option<usize>>;

/// Those of pages that have names for what they share.
///
/// # Panics
/// Never.
pub fn groups<T: std::hash::Hash + Eq>(names: impl Iterator<Item = Option<T>>) -> Groups {
    let names: Vec<Option<T>> = names.collect();
    let mut first: HashMap<&T, (usize, usize)> = HashMap::new();
    for (page, name) in names.iter().enumerate() {
        if let Some(name) = name {
            first.entry(name).or_insert((page, 0)).1 += 1;
        }
    }
    let group = |name: &Option<T>| {
        let (page, members) = first[name.as_ref()?];
        (members > 1).then_some(page)
    };
    names.iter().map(group).collect()
}

/// What there is to merge.
#[must_use]
pub fn expected() -> Groups {
    let contents = (0..2).flat_map(|guest| (0..PAGES).map(move |page| content(guest, page)));
    groups(contents.map(|content| (content.id != 0).then_some(content)))
}

/// What is merged, as the kernel has it: file and place of the page that an address maps.
///
/// # Panics
/// If /proc is not there.
#[must_use]
pub fn merged(guests: &[Pages]) -> Groups {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let mappings: Vec<(usize, usize, u64, u64)> = maps
        .lines()
        .filter(|line| line.contains("/memfd:vmm-dedup"))
        .map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (start, end) = fields[0].split_once('-').expect("a range");
            let hex = |text: &str| u64::from_str_radix(text, 16).expect("a number");
            let address = |text: &str| usize::try_from(hex(text)).expect("64 bits");
            (
                address(start),
                address(end),
                hex(fields[2]),
                fields[4].parse().expect("an inode"),
            )
        })
        .collect();
    let pagemap = std::fs::File::open("/proc/self/pagemap").expect("pagemap");
    let place = |address: usize| {
        let (start, _, offset, inode) = mappings
            .iter()
            .find(|(start, end, ..)| (*start..*end).contains(&address))?;
        let mut entry = [0; 8];
        pagemap
            .read_exact_at(&mut entry, address as u64 / 4096 * 8)
            .expect("an entry");
        // Bit 61: a page of the file, not a private copy of one.
        let of_file = u64::from_ne_bytes(entry) >> 61 & 1 == 1;
        of_file.then_some((*inode, offset + (address - start) as u64))
    };
    let pages = guests
        .iter()
        .flat_map(|guest| (0..PAGES).map(|page| (*guest, page)));
    groups(pages.map(|(guest, page)| {
        let _ = guest.load(page, 0); // so that it is there
        place(guest.address(page))
    }))
}
