/* Tries Intel AMX in a process of its own: exits 0 when one tile product comes out right.
 *
 * A processor may advertise AMX and still fault on it (a virtual machine that does not carry the tile state). Finding
 * that out costs the process its life, so services/setup/processor.py runs this as a child and reads how it ended:
 * 0 works, 3 the kernel refuses tile data, 4 wrong product, a signal otherwise.
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18
#define ROWS 16
#define ROW_BYTES 64

struct __attribute__((packed)) tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

int main(void) {
    static struct tile_config config; /* zero */
    static int8_t a[ROWS][ROW_BYTES], b[ROWS][ROW_BYTES];
    static int32_t c[ROWS][ROW_BYTES / 4];

    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0) return 3;

    config.palette = 1;
    for (int tile = 0; tile < 3; tile++) {
        config.rows[tile] = ROWS;
        config.row_bytes[tile] = ROW_BYTES;
    }
    memset(a, 2, sizeof a);
    memset(b, 3, sizeof b);

    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_loadd(1, a, ROW_BYTES);
    _tile_loadd(2, b, ROW_BYTES);
    _tile_dpbssd(0, 1, 2);
    _tile_stored(0, c, ROW_BYTES);
    _tile_release();

    for (int row = 0; row < ROWS; row++)
        for (int column = 0; column < ROW_BYTES / 4; column++)
            if (c[row][column] != 2 * 3 * ROW_BYTES) return 4;
    return 0;
}
