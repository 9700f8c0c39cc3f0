//! The tree of slots that a store publishes beside its hash index.

mod support;

use support::{Client, Server, page};
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::{PageWords, bytes_of};
use vmm_dedup_protocol::tree::{Node, TreeReader};

/// The slots of a tree, in its order.
fn in_order(tree: TreeReader<'_>, at: Option<Node>, slots: &mut Vec<Slot>) {
    if let Some(node) = at {
        let (less, more) = tree.children(node);
        in_order(tree, less, slots);
        slots.push(Slot::try_new(node).expect("a node is a slot"));
        in_order(tree, more, slots);
    }
}

fn slots(client: &Client) -> Vec<Slot> {
    let mut slots = Vec::new();
    in_order(client.index.tree(), client.index.tree().root(), &mut slots);
    slots
}

fn search(client: &Client, page: &PageWords) -> Option<Slot> {
    let compare = |node| bytes_of(page).cmp(bytes_of(&client.content(Slot::try_new(node).expect("a slot"))));
    client.index.tree().search(compare).and_then(Slot::try_new)
}

#[test]
fn published_pages_are_in_the_order_of_their_content_and_go_with_their_slots() {
    let server = Server::start(|config| config.ordered = true);
    let mut client = Client::connect(&server.socket, "a");
    let pages: Vec<PageWords> = (0..50).map(page).collect();
    let published: Vec<Slot> = client.publish(&pages).into_iter().flatten().collect();
    assert_eq!(published.len(), pages.len());

    let order = slots(&client);
    let contents: Vec<PageWords> = order.iter().map(|slot| client.content(*slot)).collect();
    assert_eq!(order.len(), pages.len());
    assert!(
        contents
            .windows(2)
            .all(|pair| bytes_of(&pair[0]) < bytes_of(&pair[1]))
    );
    for (page, slot) in pages.iter().zip(&published) {
        assert_eq!(search(&client, page), Some(*slot));
    }
    assert_eq!(search(&client, &page(99)), None);

    let gone: Vec<(Slot, i32)> = published.iter().step_by(2).map(|slot| (*slot, -1)).collect();
    client.batch(&[], &[], &gone);
    assert_eq!(slots(&client).len(), pages.len() / 2);
    assert_eq!(search(&client, &pages[0]), None);
    // In limbo still: a reference brings it back, and into the tree.
    client.batch(&[], &[], &[(published[0], 1)]);
    assert_eq!(search(&client, &pages[0]), Some(published[0]));
}

#[test]
fn a_store_that_was_not_asked_to_keeps_no_order() {
    let server = Server::start(|_| ());
    let mut client = Client::connect(&server.socket, "a");
    assert!(client.publish(&[page(1)])[0].is_some());
    assert_eq!(slots(&client), []);
}
