//! The checker finds what it is there for, in small crates that are wrong in one way each.

use crate::rules::{Rules, breaches};
use crate::source::Source;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// Two rooms, one above the other; no struct has more than three fields.
const RULES: Rules<'_> = Rules {
    rooms: &["cellar", "attic"],
    most_fields: Some(3),
    circles: false,
};

/// What is wrong in a crate with these files beside its root.
fn found(files: &[(&str, &str)]) -> Vec<String> {
    let root = ("lib.rs", "mod attic;\nmod cellar;\n");
    let files: BTreeMap<&str, &str> = [root].into_iter().chain(files.iter().copied()).collect();
    let read = |path: &Path| files.get(path.to_str()?).map(ToString::to_string);
    let source = Source::read(Path::new("lib.rs"), &read);
    breaches(&source, &RULES)
        .iter()
        .map(ToString::to_string)
        .collect()
}

/// The same, with the two rooms in a file each.
fn found_in(cellar: &str, attic: &str) -> Vec<String> {
    found(&[("cellar.rs", cellar), ("attic.rs", attic)])
}

#[test]
fn a_crate_in_order_is_let_through() {
    let attic = "use crate::cellar::{self, Box as Chest, coal::*};
        pub struct Trunk(Chest);
        impl Trunk { fn open(self) { cellar::light(); super::cellar::light() } }
        impl Drop for Trunk { fn drop(&mut self) {} }";
    let cellar = "use std::fmt; pub mod coal { pub struct Coal; } pub fn light() {}";
    assert_eq!(found_in(cellar, attic), [""; 0]);
}

#[test]
fn imports_upwards_are_found_in_whatever_way_they_are_written() {
    for cellar in [
        "use crate::attic::Trunk;",
        "use crate::{attic};",
        "use crate::{attic::{self, Trunk as T}};",
        "pub(crate) use super::attic::*;",
        "fn f() -> crate::attic::Trunk { loop {} }",
        "fn f() { super::attic::open::<u8>() }",
        "mod deep { use super::super::attic; }",
        "fn f(x: &'static str) { let c = 'a'; crate::attic::open() }",
        "const T: &[&str] = &[\"}\"]; impl crate::attic::Open for T {}",
        "fn f() { if a != crate::attic::B {} }",
        "fn f() { crate::attic::say!(1) }",
        "use crate::{attic};\n#[cfg(not(test))] mod tests {}",
        "#[cfg(any(test, unix))] use crate::attic;",
        "#[cfg(any(test, feature = \"inject\"))] mod deep { use crate::attic; }",
        "#[cfg(all(unix, not(test)))] use crate::attic;",
        "#[cfg(any(all(test, unix), windows))] fn f() { crate::attic::open() }",
    ] {
        let found = found_in(cellar, "pub struct Trunk;");
        let expected = "cellar.rs:1: cellar names attic, which stands above it";
        let all = found.iter().all(|breach| breach.starts_with(expected));
        assert!(!found.is_empty() && all, "{cellar}: {found:?}");
    }
}

#[test]
fn what_is_no_import_upwards_is_let_through() {
    for cellar in [
        "// use crate::attic;\n/* crate::attic */ /// [`crate::attic`]\nfn f() {}",
        "const A: &str = \"crate::attic\"; const B: &str = r#\"use crate::attic; \"#;",
        "#[cfg(test)] mod tests { use crate::attic; }",
        "#[cfg(test)]\n#[allow(unused)]\npub(crate) use crate::{attic, x};\nfn f() {}",
        "#[cfg(all(test, unix))] fn f() { crate::attic::open() } fn g() {}",
        "#[cfg(all(feature = \"a\", any(test, all(test, unix)),))] fn f() { crate::attic::open() } fn g() {}",
        "struct S { #[cfg(test)] a: crate::attic::Trunk, b: u8 }",
        "#[test] fn f() { crate::attic::open() }",
        "pub(in crate::attic) fn f() {}",
        "fn f() { crate::say!(1) }",
        "use attic::Trunk; use ::attic::Trunk as T;",
    ] {
        assert_eq!(found_in(cellar, ""), [""; 0], "{cellar}");
    }
}

#[test]
fn naming_the_root_is_found() {
    assert_eq!(
        found_in("use crate::Failure;", ""),
        ["cellar.rs:1: cellar names the root by crate::Failure: name the module that has it"]
    );
    assert!(found_in("mod a { use super::super::*; }", "")[0].contains("names the root"));
}

#[test]
fn tests_in_files_of_their_own_are_left_out() {
    let cellar = "#[cfg(test)]\nmod tests;\n#[cfg(test)]\n#[path = \"more.rs\"]\nmod more;";
    // The files are not there: whoever read them would fail.
    assert_eq!(found_in(cellar, ""), [""; 0]);
}

#[test]
fn modules_in_folders_are_read() {
    let wrong = "use crate::attic;";
    for files in [
        [("cellar/mod.rs", "mod coal;"), ("cellar/coal.rs", wrong)],
        [("cellar.rs", "mod coal;"), ("cellar/coal.rs", wrong)],
        [("cellar.rs", "pub mod coal;"), ("cellar/coal/mod.rs", wrong)],
        [
            ("cellar.rs", "#[path = \"coal.rs\"] pub mod black;"),
            ("coal.rs", wrong),
        ],
        [
            ("cellar.rs", "mod inner { mod coal; }"),
            ("cellar/inner/coal.rs", wrong),
        ],
    ] {
        let found = found(&[files[0], files[1], ("attic.rs", "")]);
        assert_eq!(
            found,
            [format!(
                "{}:1: cellar names attic, which stands above it, by crate::attic",
                files[1].0
            )]
        );
    }
}

#[test]
fn a_type_with_methods_in_two_rooms_is_found() {
    let cellar =
        "pub mod coal { pub struct Coal<T>(T); } pub use coal::Coal; impl<T: Fn() -> u8> Coal<T> { }";
    for attic in [
        "use crate::cellar::Coal; impl<T> Coal<T> where T: Clone { fn f(&self) {} }",
        "use crate::cellar::coal::Coal as Black; impl Black<u8> { }",
        "use crate::cellar::coal::*; /* SAFETY: it is empty. */ unsafe impl Send for Coal<u8> {} impl Coal<u8> { }",
        "impl crate::cellar::Coal<u8> { }",
        "use crate::cellar; impl cellar::Coal<u8> { }",
    ] {
        let found = found_in(cellar, attic);
        assert_eq!(found.len(), 1, "{attic}: {found:?}");
        assert!(found[0].contains("Coal has methods in two rooms"), "{found:?}");
    }
}

#[test]
fn traits_and_other_types_of_the_same_name_are_no_methods_in_two_rooms() {
    let cellar = "pub struct Coal; impl Coal { fn f(&self) -> impl Iterator<Item = u8> { [].into_iter() } }";
    for attic in [
        "use crate::cellar::Coal; impl Drop for Coal { fn drop(&mut self) {} }",
        "use crate::cellar::Coal; impl<T> From<T> for Coal where for<'a> T: Fn(&'a u8) {}",
        "struct Coal; impl Coal {}",
        "mod deep { pub struct Coal; impl Coal {} }",
        "use crate::cellar::Coal; #[cfg(test)] impl Coal {}",
    ] {
        assert_eq!(found_in(cellar, attic), [""; 0], "{attic}");
    }
}

#[test]
fn an_impl_block_may_have_400_lines() {
    let lines = |count: usize| {
        let mut text = "pub struct Coal;\nimpl Coal {\n".to_owned();
        (2..count).for_each(|n| writeln!(text, "const A{n}: char = '}}';").unwrap());
        text + "}\n"
    };
    assert_eq!(found_in(&lines(400), ""), [""; 0]);
    assert_eq!(
        found_in(&lines(401), ""),
        ["cellar.rs:2: an impl of Coal has 401 lines, 400 are allowed"]
    );
}

#[test]
fn a_struct_has_at_most_as_many_fields_as_the_rules_say() {
    for (fields, count) in [
        (
            "{ a: u8, b: HashMap<u8, Vec<(u8, u8)>>, c: Box<dyn Fn(u8, u8) -> u8>, }",
            3,
        ),
        (
            "{ #[serde(default, a = \"b\")] a: [u8; 4], pub(crate) b: u8, c: u8 }",
            3,
        ),
        ("<T, U>(T, pub U, u8);", 3),
        (";", 0),
        ("<T> where T: Into<u8> { a: T, b: u8, c: u8, d: u8 }", 4),
        ("(u8, u8, (u8, u8), u8);", 4),
    ] {
        let found = found_in(&format!("pub struct Coal{fields}"), "");
        let expected = (count > 3).then(|| format!("cellar.rs:1: Coal has {count} fields, 3 are allowed"));
        assert_eq!(found, Vec::from_iter(expected), "{fields}");
    }
}

#[test]
fn modules_of_a_room_that_name_each_other_in_a_circle_are_found() {
    let cellar = "mod coal { use super::wood; } mod wood { fn f() { crate::cellar::ash::g() } } mod ash { use super::coal::*; }";
    let found = found_in(cellar, "");
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("circle: "), "{found:?}");
    // A parent calls its child, which names the parent.
    let found = found_in(
        "struct Key; fn f() { coal::g() } mod coal { use super::Key; }",
        "",
    );
    assert!(found.len() == 1 && found[0].contains("circle: "), "{found:?}");
}

#[test]
fn a_name_that_is_exported_again_is_what_it_stands_for() {
    // The children name each other by their parent, in a circle or not.
    let parent = "mod coal; mod wood; pub use coal::Coal; pub use wood::Wood;";
    let files = |coal, wood| {
        found(&[
            ("cellar.rs", parent),
            ("cellar/coal.rs", coal),
            ("cellar/wood.rs", wood),
            ("attic.rs", "use crate::cellar::Coal;"),
        ])
    };
    let one_way = files("use super::Wood; pub struct Coal;", "pub struct Wood;");
    assert_eq!(one_way, [""; 0]);
    let circle = files(
        "use super::Wood; pub struct Coal;",
        "use super::Coal; pub struct Wood;",
    );
    assert!(circle.len() == 1 && circle[0].contains("circle: "), "{circle:?}");
}

#[test]
fn modules_that_call_each_others_methods_in_a_circle_are_found() {
    let coal = |calls: &str| format!("use super::bin::Bin; impl Bin {{ pub fn burn(&self) {{ {calls} }} }}");
    let files = |coal: &str, wood: &str| {
        let cellar = format!("mod bin {{ pub struct Bin; }} mod coal {{ {coal} }} mod wood {{ {wood} }}");
        found_in(&cellar, "")
    };
    let wood = "use super::bin::Bin; impl Bin { fn chop(&self) { self.burn() } fn len(&self) {} }";
    assert_eq!(files(&coal("self.bin.chop"), wood), [""; 0]);
    for calls in [
        "self.chop()",
        "Self::chop(self)",
        "Self::chop",
        "self.chop::<u8>()",
        "other.chop()",
    ] {
        let found = files(&coal(calls), wood);
        assert!(
            found.len() == 1 && found[0].contains("circle: "),
            "{calls}: {found:?}"
        );
    }
    // Another type has a method of that name.
    let other = format!("{wood} struct Axe; impl Axe {{ fn chop(&self) {{}} }}");
    assert_eq!(files(&coal("other.chop()"), &other), [""; 0]);
    assert_eq!(files(&coal("self.chop()"), &other).len(), 1);
}

#[test]
fn what_cannot_be_followed_is_found() {
    for cellar in [
        "include!(\"attic_names.rs\");",
        "mod deep { fn f() { include!(concat!(\"a\", \".rs\")) } }",
        "extern crate self as house; use house::attic;",
    ] {
        let found = found_in(cellar, "");
        assert!(
            found.len() == 1 && found[0].contains("hides what it names"),
            "{cellar}: {found:?}"
        );
    }
    assert_eq!(
        found_in("const A: &str = include_str!(\"a\"); extern crate alloc;", ""),
        [""; 0]
    );
}

#[test]
fn rooms_and_the_list_must_agree() {
    let found = found(&[
        ("lib.rs", "mod attic; mod annex;"),
        ("attic.rs", ""),
        ("annex.rs", ""),
    ]);
    let expected = [
        "the list of rooms:0: the module annex is in no list: say where it stands",
        "the list of rooms:0: there is no module cellar",
    ];
    assert_eq!(found, expected);
}
