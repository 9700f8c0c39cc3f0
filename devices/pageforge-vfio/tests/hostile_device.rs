//! A device that means harm: whatever it says, the driver has an error soon, and its process goes on.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};
use vmm_dedup_pageforge::driver::{ConnectError, VfioUser};

/// More than the driver waits for any answer.
const SOON: Duration = Duration::from_secs(30);

/// Connects to a device that does this with its client.
fn connect(serve: impl Fn(UnixStream) + Send + 'static) -> ConnectError {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("device");
    let listener = UnixListener::bind(&socket).unwrap();
    thread::spawn(move || listener.incoming().flatten().for_each(serve));
    let start = Instant::now();
    let error = VfioUser::connect(&socket).expect_err("it is no device");
    assert!(start.elapsed() < SOON, "{error}");
    error
}

/// A reply to the client's first message, with this size in its header.
fn reply(size: u32, rest: &[u8]) -> Vec<u8> {
    let mut reply = vec![0, 0, 1, 0]; // message 0, VERSION
    reply.extend(size.to_ne_bytes());
    reply.extend([1, 0, 0, 0, 0, 0, 0, 0]); // a reply, no error
    reply.extend(rest);
    reply
}

#[test]
fn one_that_hangs_up_is_no_device() {
    let error = connect(drop);
    assert!(matches!(error, ConnectError::Client { .. }), "{error}");
}

#[test]
fn one_that_says_nothing_is_given_up() {
    let error = connect(std::mem::forget);
    assert!(matches!(error, ConnectError::Silent(_)), "{error}");
}

#[test]
fn sizes_that_lie_harm_nobody() {
    for size in [0, 1, 15, 16, 19, 20, 21, 1 << 16, u32::MAX] {
        connect(move |mut client| {
            let _ = client.read(&mut [0; 4096]);
            let _ = client.write_all(&reply(size, &[0; 64]));
        });
    }
}

#[test]
fn noise_harms_nobody() {
    for seed in 1..40u64 {
        connect(move |mut client| {
            let mut state = seed;
            let noise: Vec<u8> = std::iter::repeat_with(|| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                state.to_be_bytes()[0]
            })
            .take(4096)
            .collect();
            let _ = client.read(&mut [0; 4096]);
            // A right beginning leads further in.
            let json = b"{\"capabilities\":{}}\0";
            let size = u32::try_from(20 + json.len()).expect("small");
            let mut answer = reply(size, &[0, 0, 1, 0]);
            answer.extend(json);
            let _ = client.write_all(&answer);
            let _ = client.write_all(&noise);
        });
    }
}
