//! Sparse matrices as overlays over a page of zeros, against CSR and against dense matrices (section 5.2, figures 10, 11).
//!
//! The paper takes 87 matrices of a public collection with at least 1.5 million values that are not zero. Here matrices are
//! made by chance: all of a kind, but for the number of such values in a line that has any (L, which the paper sorts by).
//! Each product of matrix and vector is computed from what the machine reads, and compared with the exact one.

use crate::account::{Account, MemoryInUse};
use crate::address::Pid;
use crate::config::{Config, OnWrite};
use crate::dice::Dice;
use crate::experiments::fork::ratio;
use crate::machine::{Contents, Machine, MachineError};
use crate::pipeline::Issue;
use crate::sizes::{LINE_BYTES, LineBytes, PAGE_BYTES, index, number};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Values in a line.
const PER_LINE: u64 = 8;
/// Bytes of a value.
const VALUE: u64 = 8;
/// Bytes of CSR's column and row numbers.
const NUMBER: u64 = 4;

/// The L of the paper's two extremes, and between.
pub const LOCALITIES: [f64; 9] = [1.09, 1.5, 2.0, 3.0, 4.0, 4.5, 5.0, 6.0, 8.0];

/// Where a row's values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Shape {
    /// Near the diagonal: in 128 lines, two pages.
    Band,
    /// Anywhere in the row.
    Scattered,
}

/// How a line of the matrix is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Code {
    /// Value by value: 16 loads, 8 multiplications, 8 additions.
    Scalar,
    /// Two values at a time, as optimised code for dense matrices does: half of that.
    Packed,
}

impl Code {
    fn instructions(self) -> u64 {
        match self {
            Self::Scalar => 32,
            Self::Packed => 16,
        }
    }
}

/// A matrix. Rows are multiples of a page long.
#[derive(Clone, Debug)]
pub struct Matrix {
    rows: u64,
    columns: u64,
    /// By row and column; small integers, so that sums are exact.
    values: BTreeMap<(u64, u64), f64>,
}

impl Matrix {
    /// A matrix of `rows` rows and columns (a multiple of 512), of which each row has `per_row` values in lines that have
    /// `locality` (1 to 8) of them on average.
    pub fn new(rows: u64, per_row: u64, locality: f64, shape: Shape) -> Self {
        let mut dice = Dice::new(rows + per_row);
        let mut values = BTreeMap::new();
        let lines = rows / PER_LINE;
        let window = match shape {
            Shape::Band => lines.min(128),
            Shape::Scattered => lines,
        };
        for row in 0..rows {
            let from = (row / PER_LINE).saturating_sub(window / 2).min(lines - window);
            let mut left = per_row;
            let mut taken = BTreeSet::new();
            while left > 0 && number(taken.len()) < window {
                let line = from + dice.below(window);
                if !taken.insert(line) {
                    continue;
                }
                let mut columns = BTreeSet::new();
                let wanted = left.min(around(locality, &mut dice));
                while number(columns.len()) < wanted {
                    columns.insert(line * PER_LINE + dice.below(PER_LINE));
                }
                left -= wanted;
                values.extend(
                    columns
                        .into_iter()
                        .map(|column| ((row, column), small(dice.below(9) + 1))),
                );
            }
        }
        Self {
            rows,
            columns: rows,
            values,
        }
    }

    /// A matrix of whole lines, of which a share is zero.
    pub fn of_lines(rows: u64, columns: u64, zero: f64) -> Self {
        let mut dice = Dice::new(rows);
        let mut values = BTreeMap::new();
        for row in 0..rows {
            for line in 0..columns / PER_LINE {
                if unit(&mut dice) >= zero {
                    let columns = line * PER_LINE..(line + 1) * PER_LINE;
                    values.extend(columns.map(|column| ((row, column), small(column % 7 + 1))));
                }
            }
        }
        Self {
            rows,
            columns,
            values,
        }
    }

    /// Values that are not zero.
    pub fn values(&self) -> u64 {
        number(self.values.len())
    }

    /// Values in each line that has any.
    pub fn locality(&self) -> f64 {
        ratio(self.values(), self.blocks(number(LINE_BYTES)))
    }

    /// Blocks of `bytes` bytes that have a value.
    fn blocks(&self, bytes: u64) -> u64 {
        let block = |(row, column): &(u64, u64)| (row * self.columns + column) * VALUE / bytes;
        number(self.values.keys().map(block).collect::<BTreeSet<u64>>().len())
    }

    /// Memory for all blocks of `bytes` bytes that have a value, relative to the values alone (figure 11).
    pub fn overhead(&self, bytes: u64) -> f64 {
        ratio(self.blocks(bytes) * bytes, self.values() * VALUE)
    }

    /// Bytes of CSR: values, their columns, and where rows begin.
    pub fn csr_bytes(&self) -> u64 {
        self.values() * (VALUE + NUMBER) + (self.rows + 1) * NUMBER
    }

    fn product(&self) -> Vec<f64> {
        let mut product = vec![0.0; index(self.rows)];
        for ((row, column), value) in &self.values {
            product[index(*row)] += value * factor(*column);
        }
        product
    }
}

/// The vector.
fn factor(column: u64) -> f64 {
    small(column % 5 + 1)
}

fn small(number: u64) -> f64 {
    f64::from(u32::try_from(number).expect("the number is small"))
}

fn unit(dice: &mut Dice) -> f64 {
    small(dice.below(1 << 30)) / f64::from(1 << 30)
}

/// A whole number, `mean` on average.
fn around(mean: f64, dice: &mut Dice) -> u64 {
    let least = (1..=PER_LINE)
        .rev()
        .find(|number| small(*number) <= mean)
        .unwrap_or(1);
    least + u64::from(unit(dice) < mean - small(least))
}

/// What a product took.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Run {
    /// What was counted.
    pub account: Account,
    /// Memory that overlays take.
    pub memory: MemoryInUse,
}

/// Why an experiment ended.
#[derive(Debug, thiserror::Error)]
pub enum SparseError {
    /// The machine's reason.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The product is not the exact one.
    #[error("row {row} of the product is {got}, not {expected}: the model lost data")]
    Wrong {
        /// The row.
        row: usize,
        /// What was computed.
        got: f64,
        /// What it is.
        expected: f64,
    },
}

const PID: Result<Pid, crate::address::AddressError> = Pid::try_new(1);
const MATRIX: u64 = 1 << 40;
const COLUMNS: u64 = 1 << 41;
const STARTS: u64 = 1 << 42;
const VECTOR: u64 = 1 << 43;
const PRODUCT: u64 = 1 << 44;

/// A machine with a vector, and space for the product.
struct Bench {
    machine: Machine,
    pid: Pid,
    product: Vec<f64>,
}

impl Bench {
    fn new(matrix: &Matrix, on_write: OnWrite) -> Result<Self, MachineError> {
        let mut bench = Self {
            machine: Machine::try_new(Config::table_2(on_write))?,
            pid: PID?,
            product: vec![0.0; index(matrix.rows)],
        };
        bench.map(VECTOR, matrix.columns * VALUE, Contents::Own)?;
        bench.map(PRODUCT, matrix.rows * VALUE, Contents::Own)?;
        for column in 0..matrix.columns {
            bench.put(VECTOR + column * VALUE, &factor(column).to_le_bytes())?;
        }
        Ok(bench)
    }

    fn map(&mut self, address: u64, bytes: u64, contents: Contents) -> Result<(), MachineError> {
        let pages = bytes.div_ceil(number(PAGE_BYTES));
        self.machine.map(self.pid, address, pages, contents)
    }

    fn put(&mut self, address: u64, bytes: &[u8]) -> Result<(), MachineError> {
        self.machine.write(0, self.pid, address, bytes, Issue::Free)
    }

    fn load<const N: usize>(&mut self, address: u64, issue: Issue) -> Result<[u8; N], MachineError> {
        let mut bytes = [0; N];
        self.machine.read(0, self.pid, address, &mut bytes, issue)?;
        Ok(bytes)
    }

    /// A line of the matrix, which is loaded, times a line of the vector: the first load of each is one of the code's
    /// instructions, the others hit the L1.
    fn line(&mut self, row: u64, column: u64, values: &LineBytes, code: Code) -> Result<(), MachineError> {
        let factors: LineBytes = self.load(VECTOR + column * VALUE, Issue::Free)?;
        self.machine.compute(0, code.instructions() - 2)?;
        let values = floats(values).zip(floats(&factors));
        self.product[index(row)] += values.map(|(value, factor)| value * factor).sum::<f64>();
        Ok(())
    }

    fn end_row(&mut self, row: u64) -> Result<(), MachineError> {
        let sum = self.product[index(row)];
        self.machine.compute(0, 4)?;
        self.put(PRODUCT + row * VALUE, &sum.to_le_bytes())
    }

    /// Counts what `product` does from a memory in which nothing is dirty, and compares.
    fn measure(
        mut self,
        matrix: &Matrix,
        product: impl FnOnce(&mut Self) -> Result<(), MachineError>,
    ) -> Result<Run, SparseError> {
        self.machine.settle(0)?;
        self.machine.flush();
        let memory = self.machine.memory_in_use();
        let before = self.machine.account(0)?;
        product(&mut self)?;
        self.machine.settle(0)?;
        let account = self.machine.account(0)?.since(&before);
        for (row, (got, expected)) in self.product.iter().zip(matrix.product()).enumerate() {
            if got.to_bits() != expected.to_bits() {
                let got = *got;
                return Err(SparseError::Wrong { row, got, expected });
            }
        }
        Ok(Run { account, memory })
    }
}

fn floats(bytes: &LineBytes) -> impl Iterator<Item = f64> {
    let (values, _) = bytes.as_chunks();
    values.iter().map(|bytes| f64::from_le_bytes(*bytes))
}

/// The product by overlays: computing on overlays only.
///
/// # Errors
/// [`SparseError`].
pub fn by_overlays(matrix: &Matrix, code: Code) -> Result<Run, SparseError> {
    let mut bench = Bench::new(matrix, OnWrite::Overlay)?;
    let bytes = matrix.rows * matrix.columns * VALUE;
    bench.map(MATRIX, bytes, Contents::Zeros)?;
    for ((row, column), value) in &matrix.values {
        bench.put(
            MATRIX + (row * matrix.columns + column) * VALUE,
            &value.to_le_bytes(),
        )?;
    }
    bench.measure(matrix, |bench| {
        let pages = bytes.div_ceil(number(PAGE_BYTES));
        let mut scan = bench.machine.scan(0, bench.pid, MATRIX, pages)?;
        let mut now = 0;
        while let Some((address, values)) = bench.machine.next_overlay_line(&mut scan)? {
            let place = (address - MATRIX) / VALUE;
            let (row, column) = (place / matrix.columns, place % matrix.columns);
            while now < row {
                bench.end_row(now)?;
                now += 1;
            }
            // Where the line is, and whether the row has ended.
            bench.machine.compute(0, 4)?;
            bench.line(row, column, &values, code)?;
        }
        (now..matrix.rows).try_for_each(|row| bench.end_row(row))
    })
}

/// The product by CSR.
///
/// # Errors
/// [`SparseError`].
pub fn by_csr(matrix: &Matrix) -> Result<Run, SparseError> {
    let mut bench = Bench::new(matrix, OnWrite::Copy)?;
    bench.map(MATRIX, matrix.values() * VALUE, Contents::Own)?;
    bench.map(COLUMNS, matrix.values() * NUMBER, Contents::Own)?;
    bench.map(STARTS, (matrix.rows + 1) * NUMBER, Contents::Own)?;
    let mut starts = vec![0; index(matrix.rows) + 1];
    for (at, ((row, column), value)) in (0..).zip(&matrix.values) {
        bench.put(MATRIX + at * VALUE, &value.to_le_bytes())?;
        let column = u32::try_from(*column).expect("a column has 32 bits");
        bench.put(COLUMNS + at * NUMBER, &column.to_le_bytes())?;
        starts[index(*row) + 1] = at + 1;
    }
    for row in 1..starts.len() {
        starts[row] = starts[row].max(starts[row - 1]);
    }
    for (at, start) in (0..).zip(&starts) {
        let start = u32::try_from(*start).expect("a value's number has 32 bits");
        bench.put(STARTS + at * NUMBER, &start.to_le_bytes())?;
    }
    bench.measure(matrix, |bench| {
        let mut at = 0;
        for row in 0..matrix.rows {
            let end = u32::from_le_bytes(bench.load(STARTS + (row + 1) * NUMBER, Issue::Free)?);
            while at < u64::from(end) {
                let value = f64::from_le_bytes(bench.load(MATRIX + at * VALUE, Issue::Free)?);
                let column = u32::from_le_bytes(bench.load(COLUMNS + at * NUMBER, Issue::Free)?);
                let factor = bench.load(VECTOR + u64::from(column) * VALUE, Issue::AfterLoad)?;
                // The multiplication, the addition, and the loop.
                bench.machine.compute(0, 3)?;
                bench.product[index(row)] += value * f64::from_le_bytes(factor);
                at += 1;
            }
            bench.end_row(row)?;
        }
        Ok(())
    })
}

/// The product of the whole matrix with its zeros.
///
/// # Errors
/// [`SparseError`].
pub fn dense(matrix: &Matrix, code: Code) -> Result<Run, SparseError> {
    let mut bench = Bench::new(matrix, OnWrite::Copy)?;
    bench.map(MATRIX, matrix.rows * matrix.columns * VALUE, Contents::Own)?;
    for ((row, column), value) in &matrix.values {
        bench.put(
            MATRIX + (row * matrix.columns + column) * VALUE,
            &value.to_le_bytes(),
        )?;
    }
    bench.measure(matrix, |bench| {
        for row in 0..matrix.rows {
            for column in (0..matrix.columns).step_by(index(PER_LINE)) {
                let address = MATRIX + (row * matrix.columns + column) * VALUE;
                let values: LineBytes = bench.load(address, Issue::Free)?;
                bench.machine.compute(0, 2)?;
                bench.line(row, column, &values, code)?;
            }
            bench.end_row(row)?;
        }
        Ok(())
    })
}

/// A matrix by overlays and by CSR.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Where its values are.
    pub shape: Shape,
    /// L.
    pub locality: f64,
    /// Values that are not zero.
    pub values: u64,
    /// Bytes of CSR.
    pub csr_bytes: u64,
    /// By overlays, value by value.
    pub overlay: Run,
    /// By overlays, two values at a time.
    pub packed: Run,
    /// By CSR.
    pub csr: Run,
    /// Memory for blocks of 16, 32, 64, 256, 1,024 and 4,096 bytes, relative to the values alone (figure 11).
    pub overheads: [(u64, f64); 6],
}

impl Comparison {
    /// By how much faster overlays are than CSR, as a share: 0.92 is the paper's at L = 8, -0.70 at 1.09.
    pub fn faster(&self) -> f64 {
        ratio(self.csr.account.core.cycles, self.overlay.account.core.cycles) - 1.0
    }

    /// The same with code that takes two values at a time; CSR's cannot.
    pub fn packed_faster(&self) -> f64 {
        ratio(self.csr.account.core.cycles, self.packed.account.core.cycles) - 1.0
    }

    /// Memory of the lines alone, which is what the paper's figures come to, relative to CSR: 0.66 at L = 8, 4.83 at 1.09.
    pub fn lines(&self) -> f64 {
        ratio(self.overlay.memory.overlay_lines, self.csr_bytes)
    }

    /// Memory of segments and the Overlay Mapping Table, relative to CSR.
    pub fn memory(&self) -> f64 {
        ratio(
            self.overlay.memory.segments + self.overlay.memory.omt,
            self.csr_bytes,
        )
    }
}

/// Multiplies one matrix both ways.
///
/// # Errors
/// [`SparseError`].
pub fn compare(rows: u64, per_row: u64, locality: f64, shape: Shape) -> Result<Comparison, SparseError> {
    let matrix = Matrix::new(rows, per_row, locality, shape);
    Ok(Comparison {
        shape,
        locality: matrix.locality(),
        values: matrix.values(),
        csr_bytes: matrix.csr_bytes(),
        overlay: by_overlays(&matrix, Code::Scalar)?,
        packed: by_overlays(&matrix, Code::Packed)?,
        csr: by_csr(&matrix)?,
        overheads: [16, 32, 64, 256, 1024, 4096].map(|bytes| (bytes, matrix.overhead(bytes))),
    })
}

/// The L from which on a figure is above 0 (below it at `figures`' lowest L), between two measured ones by a straight line.
pub fn crossover(figures: &[(f64, f64)]) -> Option<f64> {
    figures.windows(2).find_map(|pair| {
        let [(left, below), (right, above)] = *pair else {
            return None;
        };
        (below < 0.0 && above >= 0.0).then(|| left + (right - left) * below / (below - above))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_has_the_locality_that_was_asked_for() {
        for locality in [1.09, 4.5, 8.0] {
            let matrix = Matrix::new(1024, 32, locality, Shape::Band);
            assert!(
                (matrix.locality() - locality).abs() < 0.4,
                "{}",
                matrix.locality()
            );
            assert_eq!(matrix.values(), 32 * 1024);
        }
    }

    #[test]
    fn lines_alone_take_what_the_paper_says_at_both_ends() {
        for (locality, paper) in [(1.09, 4.83), (8.0, 0.66)] {
            let comparison = compare(512, 64, locality, Shape::Band).unwrap();
            assert!((comparison.lines() - paper).abs() < 0.1, "{}", comparison.lines());
        }
    }

    #[test]
    fn a_crossover_lies_between_two_figures() {
        let found = crossover(&[(1.0, -0.5), (4.0, -0.2), (5.0, 0.2)]).unwrap();
        assert!((found - 4.5).abs() < 1e-9);
        assert_eq!(crossover(&[(1.0, 0.1), (2.0, 0.2)]), None);
    }

    #[test]
    fn all_three_products_are_exact() {
        let matrix = Matrix::of_lines(64, 512, 0.5);
        let runs = [
            by_overlays(&matrix, Code::Packed),
            by_csr(&matrix),
            dense(&matrix, Code::Scalar),
        ];
        assert!(
            runs.iter()
                .all(|run| run.as_ref().is_ok_and(|run| run.account.core.cycles > 0))
        );
    }
}
