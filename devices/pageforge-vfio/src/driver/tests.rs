use super::*;
use vmm_dedup::compare::{Arena, conformance};

#[test]
fn it_conforms_with_one_module() {
    conformance::check(&mut |_| Box::new(PageForgeBackend::new(InProcess::new(1))));
}

#[test]
fn it_conforms_with_several_modules() {
    conformance::check(&mut |_| Box::new(PageForgeBackend::new(InProcess::new(4))));
}

#[test]
fn a_key_reads_256_bytes() {
    let arena = Arena::new(1).unwrap();
    let mut backend = PageForgeBackend::new(InProcess::new(1));
    backend.keys(&arena, &[PageId(0)]);
    assert_eq!(backend.account().bytes, 256);
}

#[test]
fn more_questions_than_the_ring_holds_are_answered() {
    let arena = Arena::new(2).unwrap();
    let mut backend = PageForgeBackend::new(InProcess::new(3));
    let pairs = vec![(PageId(0), PageId(1)); RING * 2 + 7];
    let orders = backend.compare(&arena, &pairs);
    assert_eq!(orders.len(), pairs.len());
    assert!(orders.iter().all(|order| *order == Ok(Ordering::Equal)));
}
